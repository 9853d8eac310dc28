"""DeepSeek V3 against transformers, in both forms; what its files hold besides, and what its cache costs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from paceline import LLM
from paceline.errors import OptionError
from paceline.kernels import KERNELS
from paceline.kernels.training import Sequences, run_dense, weights_of
from paceline.models.fp8 import dequantise
from tests.models.folders import configure, greedy, refuse, rewrite
from tests.models.running import SINGLY, run
from tests.models.tiny_deepseek import CONFIGS, PACKABLE, build, tiny_deepseek
from tests.sentences import assert_sentence

LENGTH = 40
TOLERANCE = 1e-4
FORMS = {"absorbed": True, "naive": False}
BLOCK = (7, 20)  # of 8-bit floats: the last ones are cut short


def ids() -> list[int]:
    return torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids()])).logits[0]
    return found


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name not in ("auto", "triton")])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(
    name: str, form: str, kernels: str, record_property: Callable[[str, object], None]
) -> None:
    model = tiny_deepseek(name)
    wanted = logits_of(model)
    loaded = build(model, kernels, FORMS[form])
    assert loaded.unused == []
    most = []
    for chunks in ([LENGTH], [13, 20, 7], SINGLY):
        logits, _ = run(loaded, ids(), chunks)
        most.append(float((logits - wanted).abs().max()))
        assert most[-1] <= TOLERANCE
    told = ", ".join(f"{figure:.1e}" for figure in most)
    record_property("shown", f"deepseek {name}, {form}, {kernels}: {told} (one pass, chunks, token by token)")
    assert wanted.std() > 0.05, "logits that hardly differ would prove nothing"


def test_the_two_forms_agree_and_neither_is_the_other(record_property: Callable[[str, object], None]) -> None:
    model = tiny_deepseek("experts_yarn")
    logits = [run(build(model, "torch", form), ids(), [LENGTH])[0] for form in FORMS.values()]
    most = float((logits[0] - logits[1]).abs().max())
    record_property("shown", f"deepseek absorbed and naive differ by at most {most:.1e}")
    assert 0 < most <= TOLERANCE


def test_yarn_makes_a_difference() -> None:
    plain, stretched = (logits_of(tiny_deepseek(name)) for name in ("dense", "yarn"))
    assert (plain - stretched).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_it_runs_under_autograd(form: str) -> None:
    model = tiny_deepseek("experts_yarn")
    loaded = build(model, "torch", FORMS[form])
    for weight in weights_of(loaded.model):
        weight.requires_grad_()
    rows = torch.tensor([ids()])
    hidden = run_dense(loaded.model, Sequences(rows, torch.arange(LENGTH)[None]))
    logits = torch.nn.functional.linear(hidden.final[0], loaded.model.head.data)
    assert (logits.detach() - logits_of(model)).abs().max() <= TOLERANCE
    logits.sum().backward()
    unused = [w for w in weights_of(loaded.model) if w.grad is None or not w.grad.abs().sum() > 0]
    assert not unused


# Files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_deepseek("experts").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_modules_behind_the_last_layer_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = run(build(folder), ids(), [LENGTH])[0]
    extra = {f"model.layers.{n}.{name}.weight": torch.ones(2) for n in (3, 4) for name in ("eh_proj", "enorm")}
    rewrite(folder, lambda state: state.update(extra))
    with caplog.at_level(logging.INFO, "paceline"):
        loaded = build(folder)
    assert loaded.unused == [] and torch.equal(run(loaded, ids(), [LENGTH])[0], wanted)
    assert [record.message for record in caplog.records] == [
        f"{folder} holds 2 modules for further tokens, which are left out"
    ]
    rewrite(folder, lambda state: state.update({"model.layers.9.eh_proj.weight": torch.ones(2)}))
    assert build(folder).unused == ["model.layers.9.eh_proj.weight"], "a gap: that is no module"


def test_a_config_as_deepseek_writes_it_is_read(tmp_path: Path) -> None:
    model = tiny_deepseek("experts_yarn")
    wanted = logits_of(model)
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    yarn = said.pop("rope_parameters")
    scaling = {name: value for name, value in yarn.items() if name not in ("rope_type", "rope_theta")}
    for name in ("rope_interleave", "num_mtp_layers", "qk_head_dim", "head_dim", "dtype", "transformers_version"):
        said.pop(name, None)
    published = {
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rope_theta": yarn["rope_theta"],
        "rope_scaling": {**scaling, "type": "yarn"},
        "num_nextn_predict_layers": 1,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps({**said, **published}))
    loaded = build(tmp_path)
    assert loaded.unused == [] and loaded.config.torch_dtype == "bfloat16"
    assert (run(loaded, ids(), [LENGTH])[0] - wanted).abs().max() <= TOLERANCE


def to_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight bits a value, and a scale for each block."""
    rows, columns = (-(-size // step) for size, step in zip(matrix.shape, BLOCK))
    scales = torch.zeros(rows, columns)
    small = torch.zeros(matrix.shape)
    for r in range(rows):
        for c in range(columns):
            at = slice(r * BLOCK[0], (r + 1) * BLOCK[0]), slice(c * BLOCK[1], (c + 1) * BLOCK[1])
            scales[r, c] = matrix[at].abs().max() / 448
            small[at] = matrix[at] / scales[r, c]
    return small.to(torch.float8_e4m3fn), scales


def put_into_blocks(state: dict[str, torch.Tensor]) -> None:
    for name in [name for name in state if "_proj" in name and "eh_proj" not in name]:
        state[name], state[f"{name}_scale_inv"] = to_blocks(state[name])


def write_blocks(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's matrices in 8-bit blocks; answers what they stand for."""
    rewrite(folder, put_into_blocks)
    values = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}
    configure(folder, quantization_config=values)
    state, dense = load_file(folder / "model.safetensors"), {}
    for name, tensor in state.items():
        if not name.endswith("_scale_inv"):
            dense[name] = tensor.float()
        if tensor.dtype == torch.float8_e4m3fn:
            for r in range(tensor.shape[0]):
                for c in range(tensor.shape[1]):
                    dense[name][r, c] *= state[f"{name}_scale_inv"][r // BLOCK[0], c // BLOCK[1]]
    return dense


@pytest.mark.parametrize("kernels, quantization", [("torch", None), ("native", None), ("native", "int8")])
def test_matrices_in_8_bit_blocks_are_read_as_what_they_stand_for(
    folder: Path, kernels: str, quantization: str | None
) -> None:
    if kernels == "native":
        tiny_deepseek("experts", **PACKABLE).save_pretrained(folder)
    dense = write_blocks(folder)
    assert sum(name.endswith("_proj.weight") for name in dense) > 10
    blocks = build(folder, kernels, quantization=quantization)
    configure(folder, quantization_config=None)
    rewrite(folder, lambda state: (state.clear(), state.update(dense)))  # type: ignore[func-returns-value]
    plain = build(folder, kernels, quantization=quantization)
    assert blocks.unused == plain.unused == []
    assert torch.equal(run(blocks, ids(), [LENGTH])[0], run(plain, ids(), [LENGTH])[0])


def test_a_stack_of_matrices_is_read_matrix_by_matrix() -> None:
    small, scales = zip(*(to_blocks(torch.randn(15, 30)) for _ in range(3)))
    stack = dequantise(torch.stack(small), torch.stack(scales), BLOCK)
    assert all(torch.equal(stack[n], dequantise(small[n], scales[n], BLOCK)) for n in range(3))


def test_8_bit_blocks_of_a_model_in_memory_are_read_too() -> None:
    model = tiny_deepseek("experts")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = "model.layers.0.mlp.down_proj.weight"
    state[name], state[f"{name}_scale_inv"] = to_blocks(state[name])
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [*BLOCK]}
    loaded = build(SimpleNamespace(config=model.config, state_dict=lambda: state))
    model.load_state_dict({**model.state_dict(), name: dequantise(state[name], state[f"{name}_scale_inv"], BLOCK)})
    assert loaded.unused == []
    assert (run(loaded, ids(), [LENGTH])[0] - logits_of(model)).abs().max() <= TOLERANCE


def test_8_bit_blocks_that_do_not_fit_are_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    write_blocks(folder)
    rewrite(folder, lambda state: state.update({f"{name}_scale_inv": torch.ones(2, 2)}))
    refuse(folder, f"{name}_scale_inv", "[2, 2]", "7 x 20", "[5, 3]")
    rewrite(folder, lambda state: state.update({name: state[name].float()}))
    refuse(folder, f"{name}_scale_inv", "float32", "float8_e4m3fn")
    rewrite(folder, lambda state: state.pop(f"{name}_scale_inv"))
    rewrite(folder, lambda state: state.update({name: state[name].to(torch.float8_e4m3fn)}))
    refuse(folder, name, "float8_e4m3fn", "quantised")


@pytest.mark.parametrize(
    "values, named",
    [
        ({"kv_lora_rank": 0}, ("kv_lora_rank=0",)),
        ({"qk_rope_head_dim": 7}, ("qk_rope_head_dim=7", "even")),
        ({"num_key_value_heads": 2}, ("num_key_value_heads=2", "4")),
        ({"scoring_func": "softmax"}, ("scoring_func='softmax'", "sigmoid")),
        ({"moe_layer_freq": 0}, ("moe_layer_freq=0",)),
        ({"first_k_dense_replace": -1}, ("first_k_dense_replace=-1",)),
        ({"first_k_dense_replace": None}, ("first_k_dense_replace=None",)),
        ({"n_group": 3}, ("3", "8")),
        ({"num_experts_per_tok": 5}, ("5", "4")),
        ({"v_head_dim": 11}, ("kv_b_proj",)),
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_is_refused(folder: Path, values: dict[str, Any], named: tuple[str, ...]) -> None:
    configure(folder, **values)
    refuse(folder, *named)


# The cache.


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_the_cache_holds_what_the_formulas_say(
    kernels: str, caplog: pytest.LogCaptureFixture, record_property: Callable[[str, object], None]
) -> None:
    model = tiny_deepseek("dense")
    shape = model.config
    latent = (shape.kv_lora_rank + shape.qk_rope_head_dim) * 4 * shape.num_hidden_layers
    head = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
    naive = shape.num_attention_heads * head * 4 * shape.num_hidden_layers
    texts = []
    for absorbed, bytes_wanted, other in ((True, latent, naive), (False, naive, latent)):
        with caplog.at_level(logging.INFO, "paceline"):
            llm = LLM(model, kernels=kernels, max_model_len=64, num_pages=8, mla_use_matrix_absorption=absorbed)
        rows = llm.engine.cache.layers[0][0].shape[0]
        assert sum(part.nbytes for layer in llm.engine.cache.layers for part in layer) == rows * bytes_wanted
        told = caplog.records[-1].message
        assert told.startswith(f"the cache takes {bytes_wanted} bytes") and f"would take {other} bytes" in told
        texts.append(greedy(llm))
    record_property("shown", f"tiny deepseek, {kernels}: {caplog.records[0].message}")
    assert texts[0] == texts[1] and naive > 4 * latent


def test_the_published_model_would_take_what_the_page_says() -> None:
    published, names = transformers.DeepseekV3Config(), ["num_attention_heads", "num_key_value_heads", "kv_lora_rank"]
    shape = {n: getattr(published, n) for n in (*names, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    one = tiny_deepseek("dense", **shape, hidden_size=32, num_hidden_layers=1, first_k_dense_replace=1)
    latent, naive = (
        size * published.num_hidden_layers for size in build(one).model.cache_bytes(torch.float32).values()
    )
    page = " ".join((Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8").split())
    each = 4 * published.num_hidden_layers
    assert f"{latent // each} values a token and layer in V3" in page
    assert f"its {published.num_attention_heads} heads would be {naive // each:,}" in page
    assert f"takes {latent} bytes a token as latent rows, where it would take {naive} bytes a token" in page


def test_a_form_that_is_none_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        LLM(tiny_deepseek("dense"), mla_use_matrix_absorption="sometimes")
    assert_sentence(caught.value, "mla_use_matrix_absorption='sometimes'", "True or False")
