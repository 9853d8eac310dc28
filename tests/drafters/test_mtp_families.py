"""GLM-4.5 and DeepSeek-V3, target and modules end to end: drafts are those of transformers' own modules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paceline import LLM, MTP, SamplingParams
from paceline.cli import app
from paceline.drafters.formats import find_held
from paceline.errors import CheckpointError
from paceline.models.fp8 import dequantise
from paceline.testing import prompts
from tests.drafters.equations import Spy
from tests.drafters.mtp_models import (
    KINDS,
    LAYERS,
    copies_of,
    drafts_of,
    features_of,
    hand_of,
    model_of,
    module_state,
    named_modules,
    write_apart,
    write_whole,
)
from tests.drafters.tiny_mtp import write_mimo
from tests.drafters.tiny_readers import write
from tests.fakes import tiny_model
from tests.native import EXACT

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def run(target: Any, drafter: Any, **options: Any) -> list[list[int]]:
    given = {"kernels": "torch", "max_model_len": 100, "device": "cpu", **options}
    return [output.outputs[0].token_ids for output in LLM(target, drafter, **given).generate(prompts(3), GREEDY)]


@pytest.mark.parametrize("kernels", ["torch", *EXACT])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_module_in_turn_drafts_what_transformers_modules_draft(
    kind: str, count: int, kernels: str, tmp_path: Path
) -> None:
    spy = Spy(MTP(quantization="none"))
    folder = write_whole(tmp_path, kind, count)
    assert run(folder, spy, kernels=kernels) == run(folder, None, kernels=kernels)
    assert len(spy.seen) > 6 and max(len(tokens) for _, _, tokens, _ in spy.seen) == count
    for text, _, tokens, _ in spy.seen:
        assert tokens == drafts_of(kind, text, count)[: len(tokens)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_modules_begin_again_where_there_are_fewer_than_drafts(kind: str, count: int, tmp_path: Path) -> None:
    """Apart from their target, too."""
    spy, by_hand = Spy(MTP(write_apart(tmp_path, kind, count), 4)), hand_of(kind, count)
    run(model_of(kind), spy)
    assert len(spy.seen) > 6
    for text, _, tokens, _ in spy.seen:
        wanted = by_hand.drafts(text, features_of(kind, text), 4)
        assert tokens == wanted[: len(tokens)]
        assert wanted[:count] == drafts_of(kind, text, count), "the equations say what transformers says"


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_the_targets_matrices_are_held_once_and_need_not_be_there(kind: str, tmp_path: Path) -> None:
    seen = []
    for copies in (False, True):
        spy = Spy(MTP(write_apart(tmp_path / str(copies), kind, 1, copies), 3))
        given: dict[str, Any] = {"kernels": "torch", "max_model_len": 100, "device": "cpu"}
        llm = LLM(model_of(kind), spy, **given)
        llm.generate(prompts(3), GREEDY)
        (module,), target = spy.made.modules, llm.engine.target.model
        assert module.embedding is target.embedding and module.head is target.head
        seen.append(spy.seen)
    assert seen[0] == seen[1] and set(copies_of(kind)) == {"embed_tokens.weight", "shared_head.head.weight"}


def as_paddle(state: dict[str, Any]) -> dict[str, Any]:
    """One module as PaddleNLP writes it: under its own names, matrices [in, out], a bias that is zero."""
    own = {"enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "eh_proj.weight"}
    own["shared_head.norm.weight"] = "norm.weight"
    names = {name: own.get(name, f"layers.0.{name}") for name in state}
    found = {
        f"deepseek_v3_mtp.{names[name]}": tensor.T if tensor.dim() == 2 else tensor for name, tensor in state.items()
    }
    model = model_of("deepseek_v3")
    extra = {"embed_tokens.weight": model.model.embed_tokens.weight, "eh_proj.bias": torch.zeros(32)}
    found |= {f"deepseek_v3_mtp.{name}": tensor.detach().clone() for name, tensor in extra.items()}
    return found | {"lm_head.weight": model.lm_head.weight.detach().T.clone()}


def test_a_module_as_paddlenlp_writes_it_drafts_the_same(tmp_path: Path) -> None:
    seen = []
    state = as_paddle(module_state("deepseek_v3", 1, 0))
    for folder in (write_apart(tmp_path / "ours", "deepseek_v3", 1), write(tmp_path / "theirs", {}, state)):
        spy = Spy(MTP(str(folder), 3))
        llm = LLM(model_of("deepseek_v3"), spy, kernels="torch", max_model_len=100, device="cpu")
        llm.generate(prompts(3), GREEDY)
        assert spy.made.modules[0].embedding is llm.engine.target.model.embedding
        seen.append(spy.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 6
    for number, (bias, same) in enumerate(((torch.full((32,), 0.5), False), (torch.zeros(32), True))):
        changed = write(tmp_path / str(number), {}, state | {"deepseek_v3_mtp.eh_proj.bias": bias})
        spy = Spy(MTP(str(changed), 3))
        run(model_of("deepseek_v3"), spy)
        assert (spy.seen == seen[0]) == same, "the bias is read"


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("kind", ["mimo", *KINDS])
def test_modules_written_apart_draft_what_they_draft_inside(kind: str, copies: bool, tmp_path: Path) -> None:
    whole = write_mimo(tmp_path / "whole") if kind == "mimo" else write_whole(tmp_path / "whole", kind, 2, copies)
    result = CliRunner().invoke(app, ["extract-mtp", whole, str(tmp_path / "apart")])
    assert result.exit_code == 0 and "use it with --drafter" in result.stdout
    held = find_held(str(tmp_path / "apart"))
    assert held is not None and held.word == "mtp"
    names = load_file(tmp_path / "apart" / "model.safetensors").keys()
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in names), "copies are left out"
    seen = []
    for drafter in (MTP(), MTP(str(tmp_path / "apart"))):
        spy = Spy(drafter)
        run(whole, spy)
        seen.append(spy.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 6


def test_what_cannot_be_written_apart_is_told(tmp_path: Path) -> None:
    whole = write_whole(tmp_path / "whole", "glm4_moe", 1)
    for out, told in ((tmp_path, "is there already; allowed: a new or empty folder"),):
        result = CliRunner().invoke(app, ["extract-mtp", whole, str(out)])
        assert result.exit_code == 2 and told in result.stderr
    result = CliRunner().invoke(app, ["extract-mtp", str(tmp_path / "none"), str(tmp_path / "out")])
    assert result.exit_code == 2 and "was not found" in result.stderr
    tiny_model().save_pretrained(tmp_path / "plain")
    result = CliRunner().invoke(app, ["extract-mtp", str(tmp_path / "plain"), str(tmp_path / "out")])
    assert result.exit_code == 2 and "holds no MTP module" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_module_in_8_bit_blocks_is_read_inside_and_apart(tmp_path: Path) -> None:
    """Its scales go with it; what is read is what they make."""
    folder = Path(write_whole(tmp_path / "whole", "deepseek_v3", 1))
    tensors, block = load_file(folder / "model.safetensors"), 16
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and "proj" in name and "eh_proj" not in name:
            rows, columns = (-(-size // block) for size in tensor.shape)
            scales = 0.5 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name)))
            tensors[name], tensors[f"{name}_scale_inv"] = tensor.to(torch.float8_e4m3fn), scales
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    assert CliRunner().invoke(app, ["extract-mtp", str(folder), str(tmp_path / "apart")]).exit_code == 0
    apart = load_file(tmp_path / "apart" / "model.safetensors")
    assert {tensor.dtype for tensor in apart.values()} == {torch.float8_e4m3fn, torch.float32}
    seen = []
    for drafter in (MTP(num_draft_tokens=3), MTP(str(tmp_path / "apart"), 3)):
        spy = Spy(drafter)
        llm = LLM(str(folder), spy, kernels="torch", max_model_len=100, device="cpu")
        llm.generate(prompts(3), GREEDY)
        name = f"model.layers.{LAYERS}.self_attn.o_proj.weight"
        wanted = dequantise(apart[name], apart[f"{name}_scale_inv"], (block, block))
        assert torch.equal(spy.made.modules[0].layer.out.weight.data, wanted)
        seen.append(spy.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_a_module_that_is_missing_misshapen_or_strange_is_refused_in_a_sentence(
    kind: str, tmp_path: Path
) -> None:
    whole = named_modules(kind, 1)
    llm = LLM(model_of(kind), kernels="torch", max_model_len=64, device="cpu")
    few = [name for name in whole if not re.search(r"experts\.[1-6]\.", name)]
    for name in few:
        rest = {other: tensor for other, tensor in whole.items() if other != name}
        longer = torch.cat([whole[name], whole[name][:1]])
        for state in (rest, rest | {name: longer}, rest | {name: whole[name][None]}, whole | {f"{name}.more": longer}):
            if state is rest and name.endswith("e_score_correction_bias"):
                continue  # zero, then
            with pytest.raises(CheckpointError) as caught:
                llm.set_drafter(MTP(str(write(tmp_path, {}, state))))
            told = str(caught.value)
            assert len(told.splitlines()) == 1 and (name.rpartition(".")[0] in told or "a hidden size of 33" in told)
    llm.set_drafter(MTP(str(write(tmp_path, {}, whole))))
