// The operators of Dobb. Each is implemented, for one kind of device, in the file of its name in cpu/ and cuda/.
#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(dobb, library) {
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
    library.def(
        "update(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] momenta, Tensor[] bases, Tensor(c!)[] copies, "
        "Tensor[] column_scales, int[] starts, int[] columns, int width, float[] scales, float decay, float momentum, "
        "bool nesterov, str precision, str norm) -> Tensor",
        tags);
    library.def("gram_(Tensor(a!) total, Tensor activations, int width) -> ()", tags);
    library.def(
        "refresh_basis(Tensor moment, Tensor basis, str method, int iterations) -> (Tensor basis_out, Tensor "
        "fell_back)",
        tags);
}
