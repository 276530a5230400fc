// Reads calls from the standard input and answers on the standard output until the input ends. All integers are 64 bits
// wide and in the machine's byte order; strings and buffers follow their length.
//   call:   operation, {name, integers}, {name, doubles}, {name, bytes off alignment, buffer}
//   answer: error message, empty for none; buffers in the order of their names
#include "harness.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "dobb_simt.h"
#include "races.h"

namespace dobb::emulation {
namespace {

constexpr int kUntouched = 0xa5;       // in front of a buffer
constexpr int kNotInitialized = 0xff;  // NaN, for scratch memory that a kernel reads before it wrote

std::map<std::string, void (*)(Call&)>& operations() {
    static std::map<std::string, void (*)(Call&)> all;
    return all;
}

bool read(void* to, std::size_t bytes) { return bytes == 0 || std::fread(to, 1, bytes, stdin) == bytes; }

void need(void* to, std::size_t bytes) {
    if (!read(to, bytes)) throw std::runtime_error("the input ended inside of a call");
}

void write(const void* from, std::size_t bytes) {
    if (bytes > 0 && std::fwrite(from, 1, bytes, stdout) != bytes) throw std::runtime_error("cannot write an answer");
}

std::size_t read_size() {
    std::int64_t size = 0;
    need(&size, sizeof(size));
    return static_cast<std::size_t>(size);
}

std::string read_string(std::size_t size) {
    std::string text(size, '\0');
    need(text.data(), size);
    return text;
}

void write_size(std::size_t size) {
    const auto wide = static_cast<std::int64_t>(size);
    write(&wide, sizeof(wide));
}

template <class T>
std::map<std::string, std::vector<T>> read_lists() {
    std::map<std::string, std::vector<T>> lists;
    for (std::size_t left = read_size(); left > 0; --left) {
        std::vector<T>& list = lists[read_string(read_size())];
        list.resize(read_size());
        need(list.data(), list.size() * sizeof(T));
    }
    return lists;
}

void read_buffers(std::map<std::string, Buffer>& buffers) {
    for (std::size_t left = read_size(); left > 0; --left) {
        const std::string name = read_string(read_size());
        const std::size_t off_alignment = read_size(), bytes = read_size();
        Buffer buffer(bytes, off_alignment);
        need(buffer.data(), bytes);
        buffers.emplace(name, std::move(buffer));
    }
}

void use_device(const Call& call) {
    auto& device = simt::emulation::device;
    device.order = static_cast<simt::emulation::Order>(call.integer("device.order"));
    device.seed = static_cast<std::uint64_t>(call.integer("device.seed"));
    device.watch_races = call.integer("device.watch_races") != 0;
    device.multiprocessors = static_cast<int>(call.integer("device.multiprocessors"));
    device.resident_blocks = static_cast<int>(call.integer("device.resident_blocks"));
    device.most_shared_memory = static_cast<std::size_t>(call.integer("device.most_shared_memory"));
}

void serve(const std::string& operation) {
    Call call;
    call.integers = read_lists<std::int64_t>();
    call.numbers = read_lists<double>();
    std::string error;
    use_device(call);
    read_buffers(call.buffers);
    try {
        const auto found = operations().find(operation);
        if (found == operations().end()) throw std::runtime_error("there is no operation " + operation);
        found->second(call);
        for (const auto& [name, buffer] : call.buffers)
            if (!buffer.front_untouched()) throw std::runtime_error("wrote in front of " + name);
    } catch (const std::exception& thrown) {
        error = std::string(thrown.what()).empty() ? "an error without a message" : thrown.what();
    }
    write_size(error.size());
    write(error.data(), error.size());
    if (!error.empty()) return;
    for (const auto& [name, buffer] : call.buffers) write(buffer.data(), buffer.bytes());
}

}  // namespace

Buffer::Buffer(std::size_t bytes, std::size_t off_alignment)
    : bytes_(bytes), off_alignment_(off_alignment), memory_(new std::byte[bytes + off_alignment]) {
    std::memset(memory_.get(), kUntouched, off_alignment);
    std::memset(data(), kNotInitialized, bytes);
    simt::emulation::watch_memory(data(), bytes);
}

Buffer::~Buffer() {
    if (memory_ != nullptr) simt::emulation::forget_memory(data());
}

bool Buffer::front_untouched() const {
    for (std::size_t i = 0; i < off_alignment_; ++i)
        if (memory_[i] != static_cast<std::byte>(kUntouched)) return false;
    return true;
}

Operation::Operation(const char* name, void (*run)(Call&)) { operations()[name] = run; }

}  // namespace dobb::emulation

int main() {
    std::int64_t size = 0;
    while (dobb::emulation::read(&size, sizeof(size))) {
        dobb::emulation::serve(dobb::emulation::read_string(static_cast<std::size_t>(size)));
        std::fflush(stdout);
    }
}
