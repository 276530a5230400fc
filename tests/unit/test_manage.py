"""Which weights Dobb takes and why not the others, on small models of layers made up here."""

import pytest
from torch import nn

from megatron_dobb.errors import BlockError
from megatron_dobb.megatron.dobb.select_weights import select_weights
from megatron_dobb.megatron.model import adapters
from megatron_dobb.megatron.model.adapters import Adapter, GlobalShape, find, matrix_of, register
from megatron_dobb.megatron.model.chunk_state import tag_of
from megatron_dobb.megatron.model.global_names import global_names, kind_of
from megatron_dobb.methods.dobb.settings import DobbConfig


class Matrix(nn.Linear):
    """A layer with an adapter; `column_shards` ranks share its inputs."""

    def __init__(self, inputs=64, outputs=32, column_shards=1):
        super().__init__(inputs // column_shards, outputs)
        self.column_shards = column_shards


class Odd(Matrix):
    """A kind of layer that its adapter refuses."""


class MatrixAdapter(Adapter):
    layer = f"{__name__}:Matrix"

    def refusal(self, module):
        return "odd layers" if isinstance(module, Odd) else None

    def geometry(self, module):
        shards = module.column_shards
        return GlobalShape(module.out_features, module.in_features * shards, shards, False)


@pytest.fixture(autouse=True)
def adapter(monkeypatch):
    monkeypatch.setattr(adapters, "REGISTRY", list(adapters.REGISTRY))
    ours = MatrixAdapter()
    register(ours)
    return ours


def blocks(**settings):
    return DobbConfig(**({"blocks": 4} | settings))


class Block(nn.Module):
    """A layer of a made-up transformer, with Megatron's `layer_number` counted from 1."""

    def __init__(self, layer_number):
        super().__init__()
        self.layer_number = layer_number
        self.fc1, self.norm, self.fc2 = Matrix(), nn.LayerNorm(32), Matrix(32, 64)


class Stage(nn.Module):
    """One pipeline stage: layers numbered from 0 in its module names."""

    def __init__(self, first_layer, layers=2):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Block(first_layer + i) for i in range(layers))


class Wrapper(nn.Module):
    """Like Float16Module."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def names(plan):
    return [weight.name for weight in plan.managed]


def parameters_on_adamw(plan):
    return {reason: number for (reason, what), number in plan.adamw.items() if what == "parameters"}


def test_matrices_go_to_dobb_and_everything_else_to_adamw_with_a_reason():
    model = nn.ModuleDict(
        {
            "fc": Matrix(),
            "odd": Odd(),
            "plain": nn.Linear(8, 8, bias=False),
            "embedding": nn.Embedding(10, 8),
            "norm": nn.LayerNorm(8),
            "conv": nn.Conv1d(4, 4, 3, bias=False),
        }
    )
    model.register_parameter("gate", nn.Parameter(model["plain"].weight.detach().clone()))
    plan = select_weights(model, blocks())
    assert names(plan) == ["fc.weight"]
    assert parameters_on_adamw(plan) == {
        "odd layers": 1,
        "no adapter for Linear": 1,
        "no adapter for Embedding": 1,
        "not a matrix (norms, biases)": 4,
        "more than two dimensions": 1,
        "2-D, but no layer's weight": 1,
    }
    assert plan.adamw["odd layers", "elements"] == 64 * 32
    managed = sum(weight.parameter.numel() for weight in plan.managed)
    elements = sum(number for (_, what), number in plan.adamw.items() if what == "elements")
    assert managed + elements == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("mark", ["is_embedding_or_output_parameter", "shared_embedding"])
def test_embeddings_and_output_layers_go_to_adamw_though_their_layer_has_an_adapter(mark):
    model = nn.ModuleDict({"output_layer": Matrix(), "fc": Matrix()})
    setattr(model["output_layer"].weight, mark, True)
    plan = select_weights(model, blocks())
    assert names(plan) == ["fc.weight"]
    assert plan.adamw["embedding or output layer", "parameters"] == 1


@pytest.mark.parametrize("order", [("embedding", "fc"), ("fc", "embedding")])
def test_a_weight_shared_with_a_layer_that_shows_no_input_goes_to_adamw(order):
    layers = {"embedding": nn.Embedding(32, 64), "fc": Matrix()}
    layers["fc"].weight = layers["embedding"].weight
    plan = select_weights(nn.ModuleDict({name: layers[name] for name in order}), blocks())
    assert names(plan) == []
    assert plan.adamw["no adapter for Embedding", "parameters"] == 1
    assert tag_of(layers["fc"].weight) is None


def test_a_weight_that_two_managed_layers_share_is_one_weight_seen_in_two_places():
    model = nn.ModuleDict({"a": Matrix(), "b": Matrix()})
    model["b"].weight = model["a"].weight
    plan = select_weights(model, blocks())
    assert names(plan) == ["a.weight", "a.weight"]
    assert [weight.module for weight in plan.managed] == [model["a"], model["b"]]


def test_frozen_weights_are_left_out():
    model = nn.ModuleDict({"a": Matrix(), "b": Matrix()})
    model["a"].weight.requires_grad_(False)
    plan = select_weights(model, blocks())
    assert names(plan) == ["b.weight"]
    assert sum(parameters_on_adamw(plan).values()) == 2  # the two biases


def test_weights_are_tagged_with_their_width_and_name():
    stage = Stage(1, layers=1)
    select_weights(stage, blocks(blocks_for={"*.fc2": 2}))
    layer = stage.decoder.layers[0]
    assert tag_of(layer.fc1.weight).alignment == 64 // 4
    assert tag_of(layer.fc2.weight).alignment == 32 // 2
    assert tag_of(layer.fc2.weight).name == "decoder.layers.0.fc2.weight"
    assert not any(tag_of(p) for p in (layer.fc1.bias, *layer.norm.parameters()))


def test_wrapping_a_model_again_with_other_settings_tags_it_afresh():
    stage = Stage(1, layers=1)
    select_weights(stage, blocks())
    select_weights(stage, blocks(exclude=("*.fc1",), blocks_for={"*.fc2": 2}))
    layer = stage.decoder.layers[0]
    assert tag_of(layer.fc1.weight) is None
    assert tag_of(layer.fc1.weight) is None
    assert tag_of(layer.fc2.weight).alignment == 16


def test_excluded_weights_go_to_adamw_and_their_patterns_count_as_used():
    plan = select_weights(Stage(1), blocks(exclude=("*.fc1", "*.attention"), blocks_for={"*.layers.1.fc2": 2}))
    assert names(plan) == ["decoder.layers.0.fc2.weight", "decoder.layers.1.fc2.weight"]
    assert [weight.width for weight in plan.managed] == [32 // 4, 32 // 2]
    assert plan.adamw["excluded by --dobb-exclude", "parameters"] == 2
    assert plan.patterns_used == {"*.fc1", "*.layers.1.fc2"}


def test_a_pattern_that_names_only_an_embedding_is_not_used():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 8), "fc": Matrix()})
    assert select_weights(model, blocks(exclude=("embedding",))).patterns_used == set()


def test_blocks_that_do_not_fit_are_an_error_that_names_the_weight_and_what_works():
    with pytest.raises(
        BlockError, match=r"decoder\.layers\.2\.fc1\.weight: --dobb-blocks 5 does not divide its 64 .*4"
    ):
        select_weights(Stage(3), blocks(blocks=5))


def test_blocks_count_over_all_tensor_parallel_ranks():
    plan = select_weights(nn.ModuleDict({"fc": Matrix(64, column_shards=2)}), blocks())
    (weight,) = plan.managed
    assert (weight.geometry.columns, weight.local_columns, weight.width) == (64, 32, 16)


def test_a_block_may_not_span_two_tensor_parallel_ranks():
    with pytest.raises(BlockError, match=r"fc\.weight: --dobb-blocks 2 .*4 tensor-parallel ranks.*use one of 4"):
        select_weights(nn.ModuleDict({"fc": Matrix(64, column_shards=4)}), blocks(blocks=2))


# Names.


@pytest.mark.parametrize("wrappers", [0, 1, 2])
def test_layers_are_numbered_over_all_pipeline_stages(wrappers):
    stage = Stage(first_layer=5)
    for _ in range(wrappers):
        stage = Wrapper(stage)
    assert names(select_weights(stage, blocks())) == [
        f"decoder.layers.{layer}.{fc}.weight" for layer in (4, 5) for fc in ("fc1", "fc2")
    ]


def test_virtual_stages_together_name_every_layer_once():
    chunks = [Wrapper(Stage(first, layers=1)) for first in (1, 3, 2, 4)]
    found = [name for chunk in chunks for name in names(select_weights(chunk, blocks()))]
    assert len(set(found)) == len(found) == 8


def test_a_layer_without_a_number_keeps_its_place():
    stage = Stage(1)
    for layer in stage.decoder.layers:
        del layer.layer_number
    assert "decoder.layers.1.fc1" in global_names(stage).values()


def test_experts_inside_a_layer_keep_their_own_numbers():
    stage = Stage(first_layer=7, layers=1)
    stage.decoder.layers[0].experts = nn.ModuleList([Matrix(), Matrix()])
    assert global_names(stage)["decoder.layers.0.experts.1"] == "decoder.layers.6.experts.1"


class Rank:
    """A process group of which only the place in it is asked."""

    def __init__(self, rank):
        self.place = rank

    def rank(self):
        return self.place


def experts_of(rank, local=2):
    """Megatron's SequentialMLP and TEGroupedMLP both count this rank's experts, and know its place."""
    module = nn.Module()
    module.num_local_experts, module.ep_group = local, Rank(rank)
    return module


def test_experts_are_numbered_over_all_expert_parallel_ranks():
    found = []
    for rank in range(3):
        stage = Stage(first_layer=7, layers=1)
        stage.decoder.layers[0].experts = experts_of(rank)
        stage.decoder.layers[0].experts.local_experts = nn.ModuleList([Matrix(), Matrix()])
        found += [name for name in names(select_weights(stage, blocks())) if "experts" in name]
    assert found == [f"decoder.layers.6.experts.local_experts.{expert}.weight" for expert in range(6)]


class Grouped(nn.Module):
    """A layer with a weight for each of its experts."""

    def __init__(self):
        super().__init__()
        for expert in range(2):
            self.register_parameter(f"weight{expert}", nn.Parameter(nn.Linear(64, 32).weight.detach().clone()))


class GroupedAdapter(Adapter):
    layer = f"{__name__}:Grouped"

    def weights(self, module):
        return dict(module.named_parameters())

    def geometry(self, module):
        return GlobalShape(32, 64, 1, False)


def test_experts_that_share_a_layer_are_numbered_over_all_expert_parallel_ranks():
    register(GroupedAdapter())
    found = []
    for rank in range(2):
        experts = experts_of(rank)
        experts.linear_fc1 = Grouped()
        plan = select_weights(nn.ModuleDict({"experts": experts}), blocks(exclude=("*.weight3",)))
        found += [(weight.name, weight.own_name) for weight in plan.managed]
    assert found == [(f"experts.linear_fc1.weight{i}", f"weight{i % 2}") for i in range(3)]


@pytest.mark.parametrize(("inputs", "settings"), [(3, {}), (8, {"blocks": None, "block_width": 16})])
def test_matrices_narrower_than_their_blocks_go_to_adamw_unless_they_get_a_count_of_their_own(inputs, settings):
    """Such as low-rank adapters beside a frozen weight."""
    model = nn.ModuleDict({"frozen": Matrix(), "lora_in": Matrix(64, inputs), "lora_out": Matrix(inputs, 64)})
    model["frozen"].weight.requires_grad_(False)
    plan = select_weights(model, blocks(**settings))
    assert names(plan) == ["lora_in.weight"]
    assert [n for reason, n in parameters_on_adamw(plan).items() if "fewer input features" in reason] == [1]
    own = select_weights(model, blocks(**settings, blocks_for={"lora_out": 1}))
    assert [(weight.name, weight.width) for weight in own.managed] == [
        ("lora_in.weight", 16),
        ("lora_out.weight", inputs),
    ]


def test_a_model_that_is_one_layer_has_a_name():
    assert names(select_weights(Matrix(), blocks())) == ["weight"]


# The registry.


def test_the_adapter_registered_last_serves_a_layer_and_its_subclasses(adapter):
    assert find(Matrix()) is adapter
    assert find(Odd()) is adapter

    class Special(MatrixAdapter):
        layer = f"{__name__}:Odd"

    special = Special()
    register(special)
    assert find(Odd()) is special
    assert find(Matrix()) is adapter


def test_an_adapter_for_a_package_that_is_not_there_does_no_harm(adapter):
    class Absent(MatrixAdapter):
        layer = "no_such_package.layers:Linear"

    register(Absent())
    assert Absent().layer_class() is None
    assert find(Matrix()) is adapter
    assert find(nn.Linear(2, 2)) is None


def test_a_user_can_put_plain_linear_layers_on_dobb():
    class PlainLinear(Adapter):
        layer = "torch.nn.modules.linear:Linear"

        def geometry(self, module):
            return GlobalShape(module.out_features, module.in_features, 1, False)

        def activation(self, module, args, kwargs, name):
            return args[0] if args else kwargs["input"]

    model = nn.ModuleDict({"fc": nn.Linear(64, 8)})
    assert names(select_weights(model, blocks())) == []
    register(PlainLinear())
    (weight,) = select_weights(model, blocks()).managed
    assert (weight.name, weight.geometry.rows, weight.width) == ("fc.weight", 8, 16)


def test_matrix_of_sees_only_a_modules_own_trainable_matrix():
    assert matrix_of(nn.Linear(2, 2)) is not None
    assert matrix_of(nn.LayerNorm(2)) is None
    assert matrix_of(nn.Conv1d(2, 2, 1)) is None
    assert matrix_of(nn.Sequential(nn.Linear(2, 2))) is None
    assert matrix_of(nn.Linear(2, 2).requires_grad_(False)) is None
    without = nn.Linear(2, 2)
    without.weight = None
    assert matrix_of(without) is None


def test_the_kind_of_a_weight_has_no_number_of_its_layer_or_expert_and_keeps_those_of_other_names():
    layers = "decoder.layers.12.mlp."
    kinds = [f"{layers}linear_fc1.weight", f"{layers}linear_fc2.weight", f"{layers}experts.linear_fc1.weight10"]
    kinds.append(f"{layers}experts.local_experts.3.linear_fc2.bias")
    assert [kind_of(name) for name in kinds] == [
        "decoder.layers.*.mlp.linear_fc1.weight",
        "decoder.layers.*.mlp.linear_fc2.weight",
        "decoder.layers.*.mlp.experts.linear_fc1.weight*",
        "decoder.layers.*.mlp.experts.local_experts.*.linear_fc2.bias",
    ]
