// Serves kernel launches to Python: each operation is a function of named buffers and numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace dobb::emulation {

// Bytes that end where a heap allocation ends, at a chosen distance from a multiple of 16.
class Buffer {
  public:
    Buffer(std::size_t bytes, std::size_t off_alignment);
    ~Buffer();
    Buffer(Buffer&&) = default;

    std::byte* data() const { return memory_.get() + off_alignment_; }
    std::size_t bytes() const { return bytes_; }
    // Whether nothing was written between the multiple of 16 and the first byte.
    bool front_untouched() const;

  private:
    std::size_t bytes_, off_alignment_;
    std::unique_ptr<std::byte[]> memory_;
};

// The arguments of one operation. A name that is missing is an error.
struct Call {
    std::map<std::string, std::vector<std::int64_t>> integers;
    std::map<std::string, std::vector<double>> numbers;
    std::map<std::string, Buffer> buffers;

    std::int64_t integer(const std::string& name) const { return one(integers, name); }
    double number(const std::string& name) const { return one(numbers, name); }

    // The buffer `name`, or with an index the buffer `name[index]` of a list.
    template <class T>
    T* data(const std::string& name) const {
        return reinterpret_cast<T*>(find(buffers, name).data());
    }
    template <class T>
    T* data(const std::string& name, std::size_t index) const {
        return data<T>(name + "[" + std::to_string(index) + "]");
    }

    template <class T>
    static const T& find(const std::map<std::string, T>& all, const std::string& name) {
        const auto found = all.find(name);
        if (found == all.end()) throw std::runtime_error("the operation was called without " + name);
        return found->second;
    }

  private:
    template <class T>
    static T one(const std::map<std::string, std::vector<T>>& all, const std::string& name) {
        const std::vector<T>& list = find(all, name);
        if (list.size() != 1)
            throw std::runtime_error(name + " has " + std::to_string(list.size()) + " entries, not 1");
        return list[0];
    }
};

// At namespace scope: `const Operation gram("gram", [](Call& call) { ... });`
struct Operation {
    Operation(const char* name, void (*run)(Call&));
};

}  // namespace dobb::emulation
