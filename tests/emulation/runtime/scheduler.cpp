// Runs the blocks of a grid one after the other, the threads of a block as fibers that stop where they must meet.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "fiber.h"
#include "races.h"
#include "warp.h"

namespace dobb::simt::emulation {

Device device;
Position position;

namespace {

constexpr int kMostThreads = 1024;
constexpr int kNotInitialized = 0xff;  // of every byte: NaN in fp32, bf16 and fp16

enum class State { kReady, kWaiting, kReturned };

struct Copy {
    void* shared;
    const void* global;
    std::size_t bytes;
};

struct Thread {
    Fiber fiber;
    bool usable = false;  // its fiber waits for the next block, and is not somewhere in an abandoned kernel
    State state = State::kReturned;
    Operation operation{};
    void* argument = nullptr;
    Site site;
    std::vector<Copy> copies;               // not committed yet
    std::vector<std::vector<Copy>> groups;  // committed, the oldest first
};

// The threads that can run, one bit each: most of the emulation's time would go into looking for the next one.
class ReadySet {
  public:
    void clear() { words_ = {}; }
    void add(int thread) { words_[word(thread)] |= bit(thread); }
    void remove(int thread) { words_[word(thread)] &= ~bit(thread); }

    // The first one at or after `start`, going on at 0 behind the last; -1 if there is none.
    int next(int start) const {
        const std::size_t first = word(start);
        const std::uint64_t from_start = ~std::uint64_t{0} << (start % 64);
        if (const std::uint64_t found = words_[first] & from_start; found != 0) return lowest(first, found);
        for (std::size_t i = 1; i <= words_.size(); ++i) {
            const std::size_t w = (first + i) % words_.size();
            if (words_[w] != 0) return lowest(w, words_[w]);
        }
        return -1;
    }

    int last() const {
        for (std::size_t w = words_.size(); w-- > 0;)
            if (words_[w] != 0) return static_cast<int>(64 * w) + 63 - std::countl_zero(words_[w]);
        return -1;
    }

  private:
    static std::size_t word(int thread) { return static_cast<std::size_t>(thread) / 64; }
    static std::uint64_t bit(int thread) { return std::uint64_t{1} << (thread % 64); }
    static int lowest(std::size_t w, std::uint64_t bits) { return static_cast<int>(64 * w) + std::countr_zero(bits); }

    std::array<std::uint64_t, kMostThreads / 64> words_{};
};

struct Scheduler {
    Fiber host;
    std::vector<std::unique_ptr<Thread>> threads;
    ReadySet ready;
    std::minstd_rand chance;
    void (*kernel)(const void* arguments) = nullptr;
    const void* arguments = nullptr;
    Grid grid{};
    std::string fault;
};

Scheduler scheduler;

Thread& current() { return *scheduler.threads[static_cast<std::size_t>(position.thread)]; }

std::string describe(const Site& site) {
    const char* slash = std::strrchr(site.file_name(), '/');
    return std::string(slash != nullptr ? slash + 1 : site.file_name()) + ":" + std::to_string(site.line());
}

bool same(const Site& a, const Site& b) {
    return a.line() == b.line() && a.column() == b.column() &&
           (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

bool same(const Thread& a, const Thread& b) {
    return a.state == b.state && (a.state != State::kWaiting || (a.operation == b.operation && same(a.site, b.site)));
}

const char* name(Operation operation) {
    switch (operation) {
        case Operation::kBarrier:
            return "barrier";
        case Operation::kWarpBarrier:
            return "warp_barrier";
        case Operation::kShuffle:
            return "shuffle_xor";
        case Operation::kLoadMatrices:
            return "load_matrices";
        case Operation::kLoadMatricesTransposed:
            return "load_matrices_transposed";
        case Operation::kMultiplyAddBf16:
            return "multiply_add_bf16";
        case Operation::kMultiplyAddFp16:
            return "multiply_add_fp16";
    }
    return "unknown";
}

std::string where() {
    return "block " + std::to_string(position.block) + " of the kernel launched at " + describe(scheduler.grid.site);
}

// Which threads wait where, as ranges of neighbours that do the same.
std::string divergence() {
    std::ostringstream text;
    text << "divergence in " << where() << ": ";
    const int count = scheduler.grid.threads;
    for (int first = 0; first < count;) {
        const Thread& thread = *scheduler.threads[static_cast<std::size_t>(first)];
        int last = first;
        while (last + 1 < count && same(*scheduler.threads[static_cast<std::size_t>(last + 1)], thread)) ++last;
        text << (first > 0 ? ", " : "") << (first == last ? "thread " : "threads ") << first;
        if (last > first) text << "-" << last;
        if (thread.state == State::kReturned)
            text << " returned";
        else
            text << (first == last ? " waits" : " wait") << " at " << name(thread.operation) << " ("
                 << describe(thread.site) << ")";
        first = last + 1;
    }
    text << "; all threads of a block must meet at one barrier, all lanes of a warp at one warp-wide operation";
    return text.str();
}

void fiber_main() {
    Fiber::arrived(scheduler.host);
    while (true) {
        Thread& thread = current();
        try {
            scheduler.kernel(scheduler.arguments);
        } catch (const std::exception& error) {
            scheduler.fault = error.what();
        }
        thread.state = State::kReturned;
        thread.usable = true;
        thread.fiber.switch_to(scheduler.host);
    }
}

// The thread to run next, or -1 if none can.
int choose(int previous) {
    switch (device.order) {
        case Order::kForward:
            return scheduler.ready.next(0);
        case Order::kBackward:
            return scheduler.ready.last();
        case Order::kRotating:
            return scheduler.ready.next((previous / kWarp + 1) * kWarp % scheduler.grid.threads);
        case Order::kShuffled:
            return scheduler.ready.next(static_cast<int>(scheduler.chance()) % scheduler.grid.threads);
    }
    throw std::runtime_error("there is no such order of threads");
}

bool all_wait_as_first(int first, int count) {
    Thread& model = *scheduler.threads[static_cast<std::size_t>(first)];
    for (int i = first; i < first + count; ++i)
        if (!same(*scheduler.threads[static_cast<std::size_t>(i)], model)) return false;
    return model.state == State::kWaiting;
}

void release(int first, int count) {
    for (int i = first; i < first + count; ++i) {
        scheduler.threads[static_cast<std::size_t>(i)]->state = State::kReady;
        scheduler.ready.add(i);
    }
}

// Lets go on those that waited for the thread that has just stopped.
void complete(int stopped, int& at_barrier, std::vector<int>& waiting_lanes) {
    const Thread& thread = *scheduler.threads[static_cast<std::size_t>(stopped)];
    if (thread.state != State::kWaiting) return;
    if (thread.operation == Operation::kBarrier) {
        if (++at_barrier == scheduler.grid.threads && all_wait_as_first(0, at_barrier)) {
            at_barrier = 0;
            races_meet_block();
            release(0, scheduler.grid.threads);
        }
        return;
    }
    const int warp = stopped / kWarp;
    int& waiting = waiting_lanes[static_cast<std::size_t>(warp)];
    if (++waiting < kWarp || !all_wait_as_first(warp * kWarp, kWarp)) return;
    void* arguments[kWarp];
    for (int lane = 0; lane < kWarp; ++lane)
        arguments[lane] = scheduler.threads[static_cast<std::size_t>(warp * kWarp + lane)]->argument;
    run_for_warp(thread.operation, arguments);
    if (thread.operation == Operation::kWarpBarrier) races_meet_warp(warp);
    waiting = 0;
    release(warp * kWarp, kWarp);
}

void run_block(int block) {
    const Grid& grid = scheduler.grid;
    // From the heap, of the exact size and anew for each block: the address sanitizer watches its ends.
    const std::unique_ptr<void, decltype(&std::free)> shared(std::malloc(grid.shared_bytes), &std::free);
    std::memset(shared.get(), kNotInitialized, grid.shared_bytes);
    position = {0, grid.threads, block, grid.blocks, static_cast<std::byte*>(shared.get()), grid.shared_bytes};
    for (int i = 0; i < grid.threads; ++i) {
        Thread& thread = *scheduler.threads[static_cast<std::size_t>(i)];
        if (!thread.usable) thread.fiber.prepare(&fiber_main);
        thread.usable = false;
        thread.copies.clear();
        thread.groups.clear();
    }
    races_enter_block();
    release(0, grid.threads);
    int at_barrier = 0, running = 0;
    std::vector<int> waiting_lanes(static_cast<std::size_t>(grid.threads / kWarp), 0);
    while ((running = choose(running)) >= 0) {
        Thread& thread = *scheduler.threads[static_cast<std::size_t>(running)];
        scheduler.ready.remove(running);
        position.thread = running;
        races_enter_thread(true);
        scheduler.host.switch_to(thread.fiber);
        races_enter_thread(false);
        if (!scheduler.fault.empty()) throw std::runtime_error(scheduler.fault);
        complete(running, at_barrier, waiting_lanes);
    }
    for (int i = 0; i < grid.threads; ++i)
        if (scheduler.threads[static_cast<std::size_t>(i)]->state != State::kReturned)
            throw std::runtime_error(divergence());
}

void check(const Grid& grid) {
    const std::string at = "launch at " + describe(grid.site) + ": ";
    if (grid.blocks < 1) throw std::runtime_error(at + std::to_string(grid.blocks) + " blocks, expected at least 1");
    if (grid.threads < kWarp || grid.threads > kMostThreads || grid.threads % kWarp != 0)
        throw std::runtime_error(at + std::to_string(grid.threads) +
                                 " threads in a block, expected a multiple of 32 up to 1024");
    if (grid.shared_bytes > device.most_shared_memory)
        throw std::runtime_error(at + std::to_string(grid.shared_bytes) + " bytes of shared memory, expected at most " +
                                 std::to_string(device.most_shared_memory));
}

}  // namespace

void meet(Operation operation, void* argument, const Site& site) {
    Thread& thread = current();
    thread.state = State::kWaiting;
    thread.operation = operation;
    thread.argument = argument;
    thread.site = site;
    thread.fiber.switch_to(scheduler.host);
}

void fault(const std::string& message, const Site& site) { fault(message + " at " + describe(site)); }

void fault(const std::string& message) {
    scheduler.fault = message + ", thread " + std::to_string(position.thread) + " of " + where();
    current().fiber.switch_to(scheduler.host);
    std::abort();  // nobody switches back
}

void check_aligned(const void* address, std::size_t bytes, const char* what, const Site& site) {
    const std::size_t off = reinterpret_cast<std::uintptr_t>(address) % bytes;
    if (off != 0)
        fault(std::string(what) + " of " + std::to_string(bytes) + " bytes at an address that is " +
                  std::to_string(off) + " off its alignment",
              site);
}

void check_shared(const void* address, std::size_t bytes, const char* what, const Site& site) {
    const auto from = reinterpret_cast<std::uintptr_t>(address),
               begin = reinterpret_cast<std::uintptr_t>(position.shared);
    if (from < begin || from + bytes > begin + position.shared_bytes)
        fault(std::string(what) + " outside of shared memory: bytes " +
                  std::to_string(static_cast<std::int64_t>(from - begin)) + " to " +
                  std::to_string(static_cast<std::int64_t>(from - begin + bytes)) + " of " +
                  std::to_string(position.shared_bytes),
              site);
}

void note_read(const void* address, std::size_t bytes, const Site& site) {
    note_access(Access::kRead, address, bytes, {&site});
}

void add_atomically(unsigned long long* to, unsigned long long x) { *to += x; }

void add_copy(void* shared, const void* global, std::size_t bytes, const Site& site) {
    check_aligned(shared, bytes, "copy_async", site);
    check_aligned(global, bytes, "copy_async", site);
    check_shared(shared, bytes, "copy_async", site);
    note_access(Access::kRead, global, bytes, {&site});
    note_access(Access::kCopyUnderWay, shared, bytes, {&site});
    Quad probe;
    std::memcpy(&probe, global, bytes);           // out of bounds is found here, where the kernel asks for it
    std::memset(shared, kNotInitialized, bytes);  // until the wait it is neither the old nor the new
    current().copies.push_back({shared, global, bytes});
}

void commit_copies() {
    Thread& thread = current();
    thread.groups.push_back(std::move(thread.copies));
    thread.copies.clear();
}

void finish_copies(int pending) {
    auto& groups = current().groups;
    while (groups.size() > static_cast<std::size_t>(pending)) {
        for (const Copy& copy : groups.front()) {
            note_access(Access::kCopyDone, copy.shared, copy.bytes, {});
            std::memcpy(copy.shared, copy.global, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

void run(const Grid& grid, void (*kernel)(const void* arguments), const void* arguments) {
    check(grid);
    races_enter_launch();
    scheduler.grid = grid;
    scheduler.kernel = kernel;
    scheduler.arguments = arguments;
    scheduler.fault.clear();
    scheduler.chance.seed(device.seed + 1);
    scheduler.ready.clear();
    while (scheduler.threads.size() < static_cast<std::size_t>(grid.threads))
        scheduler.threads.push_back(std::make_unique<Thread>());
    std::vector<int> blocks(static_cast<std::size_t>(grid.blocks));
    std::iota(blocks.begin(), blocks.end(), 0);
    if (device.order == Order::kBackward) std::reverse(blocks.begin(), blocks.end());
    if (device.order == Order::kShuffled) std::shuffle(blocks.begin(), blocks.end(), scheduler.chance);
    for (const int block : blocks) run_block(block);
}

}  // namespace dobb::simt::emulation
