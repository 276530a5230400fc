// The memory side of the update, written over the vector type of vector_*.h: rows of a unit on their way from G and M
// to its tiles, and from there to W. A unit's rows are computed on while the next unit's come in and the last one's go
// out, so that memory and arithmetic work at the same time. Strided rows of W, M and G would crowd a few sets of the
// cache if they had to stay there; their tiles are contiguous.
#pragma once

namespace dobb::cpu::DOBB_ISA {

// M <- mu M + (1 - mu) G for one row; what will be projected goes to the tiles.
template <class G, class M>
void take_in(const Job& job, std::int64_t row, const Settings& settings) {
    const std::int64_t at = job.unit.offset + row * job.unit.row_stride;
    const G* g = static_cast<const G*>(job.segment->gradient) + at;
    M* m = static_cast<M*>(job.segment->momentum) + at;
    const Vector weight = broadcast(settings.gradient_weight);
    float* source = job.tiles + row * job.stride;
    for (std::int64_t k = 0; k < job.unit.blocks;
         ++k, g += job.width, m += job.width, source += job.unit.rows * job.stride) {
        std::int64_t c = 0;
        for (; c + kLanes <= job.width; c += kLanes) {
            const Vector x = load(g + c), old = load(m + c);
            const Vector updated = multiply_add(weight, subtract(x, old), old);
            store(m + c, updated);
            store(source + c, settings.nesterov ? multiply_add(weight, subtract(x, updated), updated) : updated);
        }
        for (; c < job.width; ++c) {
            const float x = to_float(g[c]), old = to_float(m[c]);
            const float updated = old + settings.gradient_weight * (x - old);
            put(m + c, updated);
            source[c] = settings.nesterov ? updated + settings.gradient_weight * (x - updated) : updated;
        }
    }
}

// W <- decay W - scale direction for one row.
inline void give_out(const Job& job, std::int64_t row, const Settings& settings) {
    const std::int64_t at = job.unit.offset + row * job.unit.row_stride;
    float* w = job.segment->weight + at;
    std::uint16_t* copy = job.segment->copy ? job.segment->copy + at : nullptr;
    const float* direction = job.tiles + row * job.stride;
    const Vector keep = broadcast(settings.decay), step = broadcast(-job.segment->scale);
    for (std::int64_t k = 0; k < job.unit.blocks; ++k, direction += job.unit.rows * job.stride) {
        std::int64_t c = 0;
        for (; c + kLanes <= job.width; c += kLanes) {
            const Vector x = multiply_add(step, load(direction + c), multiply(keep, load(w + c)));
            store(w + c, x);
            if (copy) store(copy + c, x);
        }
        for (; c < job.width; ++c) {
            const float x = w[c] * settings.decay - job.segment->scale * direction[c];
            w[c] = x;
            if (copy) put(copy + c, x);
        }
        w += job.width;
        if (copy) copy += job.width;
    }
}

class Traffic {
  public:
    // Moves the rows of `in` and `out`, either of which may be none, in about `calls` calls of `advance`.
    Traffic(const Job& in, const Job& out, std::int64_t calls, const Settings& settings)
        : in_(in), out_(out), settings_(settings), fetch_(in, out) {
        if (calls > 0) {
            rate_ = (fetch_.rows() << kFraction) / calls + 1;
            line_rate_ = fetch_.rows() * fetch_.lines_of_row() / calls + 1;
        }
        if (!in.segment) return;
        const bool g = in.segment->gradient_is_bf16, m = in.segment->momentum_is_bf16;
        using Half = std::uint16_t;
        take_in_ =
            g ? (m ? take_in<Half, Half> : take_in<Half, float>) : (m ? take_in<float, Half> : take_in<float, float>);
    }

    DOBB_INLINE void advance() {
        fetch_.some(line_rate_);
        progress_ += rate_;
        if (row_ + kRowsAhead < progress_ >> kFraction) move((progress_ >> kFraction) - kRowsAhead);
    }

    // Moves what is left.
    void finish() { move(fetch_.rows()); }

  private:
    static constexpr int kFraction = 24;
    static constexpr std::int64_t kRowsAhead = 4;  // rows that are fetched before their turn

    void move(std::int64_t end) {
        if (end > fetch_.rows()) end = fetch_.rows();
        for (; row_ < end; ++row_) {
            if (row_ < in_.rows()) take_in_(in_, row_, settings_);
            if (row_ < out_.rows()) give_out(out_, row_, settings_);
        }
    }

    const Job in_, out_;
    const Settings settings_;
    Fetch fetch_;
    void (*take_in_)(const Job&, std::int64_t, const Settings&) = nullptr;
    std::int64_t rate_ = 0, line_rate_ = 0, progress_ = 0, row_ = 0;
};

}  // namespace dobb::cpu::DOBB_ISA
