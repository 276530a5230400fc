// A unit in work, and the fetching of its memory, written over the vector type of vector_*.h.
#pragma once

namespace dobb::cpu::DOBB_ISA {

constexpr int kCacheLine = 64;

// A block's tile, [rows, stride]: what is projected, which the directions then replace.
struct Tile {
    float* values;
    std::int64_t rows, width, stride;
};

// A unit in work.
struct Job {
    const Segment* segment = nullptr;  // null for none
    Unit unit = {};
    float* tiles = nullptr;  // [blocks, rows, stride]
    std::int64_t width = 0, stride = 0;

    Tile tile(std::int64_t block) const { return {tiles + block * unit.rows * stride, unit.rows, width, stride}; }
    std::int64_t rows() const { return segment ? unit.rows : 0; }
};

// Fetches the rows of one unit's G and M and of another's W into the second level of the cache, a few lines at a time:
// more than a core can have on their way at once would hold up its arithmetic.
class Fetch {
  public:
    Fetch(const Job& in, const Job& out) {
        if (in.segment) {
            add(in, in.segment->gradient, in.segment->gradient_is_bf16 ? 2 : 4);
            add(in, in.segment->momentum, in.segment->momentum_is_bf16 ? 2 : 4);
        }
        if (out.segment) add(out, out.segment->weight, 4);
        if (count_ > 0) start_run();
    }

    std::int64_t rows() const { return rows_; }
    std::int64_t lines_of_row() const { return lines_of_row_; }

    DOBB_INLINE void some(std::int64_t lines) {
        for (; lines > 0 && row_ < rows_; --lines) {
            __builtin_prefetch(line_, 0, 2);
            line_ += kCacheLine;
            if (line_ >= end_) next_run();
        }
    }

  private:
    struct Array {
        const char* first;
        std::int64_t bytes, stride, rows;  // bytes of a row, and from one to the next
    };

    void add(const Job& job, const void* array, std::int64_t size) {
        const std::int64_t bytes = job.unit.blocks * job.width * size;
        arrays_[count_++] = {static_cast<const char*>(array) + job.unit.offset * size, bytes,
                             job.unit.row_stride * size, job.unit.rows};
        rows_ = job.unit.rows > rows_ ? job.unit.rows : rows_;
        lines_of_row_ += bytes / kCacheLine + 1;
    }

    void start_run() {
        const Array& array = arrays_[which_];
        line_ = array.first + row_ * array.stride;
        end_ = line_ + array.bytes;
    }

    void next_run() {
        do {
            if (++which_ < count_) continue;
            which_ = 0;
            if (++row_ == rows_) return;
        } while (row_ >= arrays_[which_].rows);
        start_run();
    }

    Array arrays_[3] = {};
    int count_ = 0, which_ = 0;
    std::int64_t row_ = 0, rows_ = 0, lines_of_row_ = 0;
    const char *line_ = nullptr, *end_ = nullptr;
};

}  // namespace dobb::cpu::DOBB_ISA
