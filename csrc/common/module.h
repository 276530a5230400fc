// Lets a topic add functions to megatron_dobb._C from a file of its own, as TORCH_LIBRARY does for operators.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace dobb {

using DefineFunctions = void (*)(pybind11::module_&);

inline std::vector<DefineFunctions>& module_functions() {
    static std::vector<DefineFunctions> all;
    return all;
}

// One static object in the topic's file is all that it takes.
struct ModuleFunctions {
    explicit ModuleFunctions(DefineFunctions define) { module_functions().push_back(define); }
};

}  // namespace dobb
