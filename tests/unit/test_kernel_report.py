"""The report on the CUDA kernels says what the assembler said."""

import pytest

from tools import kernel_report as report

PRINTED = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN4dobb4cuda12fused_updateINS0_7VariantILi12ELi2ELi1ELb0ELb1EEEEEvNS0_7OnePassE' for 'sm_90'
ptxas info    : Function properties for _ZN4dobb4cuda12fused_updateINS0_7VariantILi12ELi2ELi1ELb0ELb1EEEEEvNS0_7OnePassE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN4dobb4cuda15streamed_updateINS0_8StreamedILi32ELi2EEEEEvNS0_7OnePassE' for 'sm_90'
ptxas info    : Function properties for _ZN4dobb4cuda15streamed_updateINS0_8StreamedILi32ELi2EEEEEvNS0_7OnePassE
    16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Compiling entry function '_ZN4dobb4cuda10wide_signsILb0EEEvNS0_8WideWorkE' for 'sm_90'
ptxas info    : Function properties for _ZN4dobb4cuda10wide_signsILb0EEEvNS0_8WideWorkE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 512 bytes smem
"""  # noqa: E501


def test_registers_spills_and_template_arguments_are_read():
    fused, streamed, wide = report.parse(PRINTED)
    assert fused == report.Kernel("fused_update", (12, 2, 1, 0, 1), 168, 0)
    assert streamed == report.Kernel("streamed_update", (32, 2), 255, 44)
    assert wide == report.Kernel("wide_signs", (0,), 30, 0)
    assert [kernel.is_usual for kernel in (fused, streamed, wide)] == [True, True, False]


def test_an_output_without_a_report_is_an_error():
    with pytest.raises(ValueError, match="-Xptxas=-v"):
        report.parse("nvcc warning : nothing")


def test_the_table_has_the_usual_kernels_first_and_columns_for_each_architecture():
    fused, streamed, wide = report.parse(PRINTED)
    lines = report.table({"80": [wide, streamed, fused], "90": [wide._replace(registers=31), streamed, fused]})
    assert lines[0] == "| kernel | sm_80: registers | spilled bytes | sm_90: registers | spilled bytes |"
    assert lines[2:] == [
        "| fused_update<12, 2, 1, 0, 1> | 168 | 0 | 168 | 0 |",
        "| streamed_update<32, 2> | 255 | 44 | 255 | 44 |",
        "| wide_signs<0> | 30 | 0 | 31 | 0 |",
    ]
