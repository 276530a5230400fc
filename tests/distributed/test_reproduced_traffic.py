"""What `tools/reproduce.py table3` prints as measured is what the optimizers' processes really exchange."""

from tools.reproduction import traffic


def test_an_update_of_dobb_passes_nothing_and_a_refresh_the_triangles_of_the_moments():
    updates, refreshes = traffic.table3(["2 flat shards (DP 2)", "TP 2"])
    measured = {(name, shards): (elements, more) for name, shards, elements, more, *_ in updates.rows}
    assert measured["Dobb", "2 flat shards (DP 2)"] == (0, 0)
    assert measured["Dobb", "TP 2"] == (0, 0)
    assert measured["Muon", "2 row shards"][0] == traffic.ROWS * traffic.COLUMNS
    assert measured["Dion", "2 row shards"][0] == traffic.RANK * (traffic.ROWS + traffic.COLUMNS)
    data, tensor = refreshes.rows
    _, matrices, triangles, scattered, others, padding = data
    assert matrices == 8
    assert padding == 0
    assert triangles + matrices <= scattered <= triangles + matrices + 1
    assert others > 0, "the owners get blocks and send bases"
    assert tensor[3:5] == (0, 0), "one data-parallel rank has nobody to tell"


def test_scaling_columns_costs_one_element_per_column_of_a_sharded_output_axis(monkeypatch):
    monkeypatch.setattr(traffic, "VARIANTS", {"Dobb-l2": traffic.VARIANTS["Dobb-l2"]})
    ((name, _, _, flat, tensor, how),) = traffic.table7()[0].rows
    assert (name, how) == ("Dobb-l2", "measured")
    assert flat == (64 + 32 + 64 + 256) / 4
    assert tensor == (64 + 64) / 4, "QKV and fc1 are cut on their output axis, the other two on their input axis"
