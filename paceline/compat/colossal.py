"""Colossal-Inference's own names, so that its scripts run with nothing but the import changed: a thin face over `LLM`.

    import paceline.compat.colossal as colossalai
    from paceline.compat.colossal import GenerationConfig, InferenceConfig, InferenceEngine

Knows their signatures. What an option means stands in the table of spellings, as everywhere.
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig as GenerationConfig

from paceline import LLM
from paceline.compat.library import REQUEST
from paceline.drafters import make
from paceline.drafters.table import find, find_config
from paceline.errors import OptionError

# Theirs where nothing is given. Their dtype, half precision, is not among them: ours depends on the device.
SIZES = {"max_batch_size": 8, "max_input_len": 256, "max_output_len": 256, "max_n_spec_tokens": 5}
SAMPLING = {"do_sample": False, "top_k": 50}
GLIDE: Any = find("glide")
UNSAID = ("num_attention_heads", "rms_norm_eps", "rope_theta")  # by a GLIDE drafter's tensors
NoPaddingLlamaModelInferPolicy = SimpleNamespace  # how a model is to be run, which its family says here


def launch_from_torch(*ignored: Any, **named: Any) -> None:
    """There is nothing to launch."""
    logging.getLogger("paceline").warning("launch_from_torch has no effect: one process runs the model")


class DistCoordinator:
    """Of their processes the first one prints; here there is one."""

    print_on_master = staticmethod(print)


class InferenceConfig(SimpleNamespace):
    """Their config: any of its fields, by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**SIZES, **SAMPLING, **options})


class InferenceEngine:
    """Their engine; ours is its `llm`."""

    def __init__(
        self, model_or_path: Any, tokenizer: Any = None, inference_config: Any = None, verbose: Any = None, **more: Any
    ) -> None:
        options = {**vars(inference_config or InferenceConfig()), "verbose": verbose or None, **more}
        # What holds for requests that bring no generation_config.
        self._presets = {name: options.pop(name) for name in ("do_sample", *REQUEST) if name in options}
        self._drafter: Any = None
        self._length = options.get("max_n_spec_tokens", SIZES["max_n_spec_tokens"])
        self.llm = LLM(model_or_path, tokenizer=tokenizer, **options)

    def enable_spec_dec(
        self, drafter_model: Any = None, n_spec_tokens: int | None = None, use_glide_drafter: bool = False
    ) -> None:
        """Draft with this model from now on; without one, with the last."""
        drafter = self._drafter if drafter_model is None else drafter_model
        if drafter is None:
            raise OptionError("enable_spec_dec needs a drafter model: none was given so far")
        length = self._length if n_spec_tokens is None else n_spec_tokens
        made: Any = make(drafter, length)
        if made is drafter and (n_spec_tokens is not None or find_config(made) is GLIDE):
            made = dataclasses.replace(made, num_draft_tokens=length)  # from_pretrained knew none
        if use_glide_drafter and find_config(made) is not GLIDE:
            raise OptionError("use_glide_drafter=True needs a GLIDE drafter: its folder, or what from_pretrained gives")
        self.llm.set_drafter(made)
        self._drafter = drafter

    def disable_spec_dec(self) -> None:
        self.llm.set_drafter(None)

    def clear_spec_dec(self) -> None:
        self.disable_spec_dec()
        self._drafter = None

    def generate(
        self,
        prompts: str | list[str] | None = None,
        *,
        prompts_token_ids: Any = None,
        request_ids: list[int] | None = None,
        return_token_ids: bool = False,
        generation_config: GenerationConfig | None = None,
    ) -> Any:
        """The texts, each with its prompt before the answer, in the order of the prompts or of request_ids; with
        return_token_ids a pair, the texts and the answers' token ids."""
        ids = None if prompts_token_ids is None else [[int(token) for token in one] for one in prompts_token_ids]
        if prompts is None and ids is None:
            raise OptionError("generate needs prompts or prompts_token_ids, and neither was given")
        how = self._presets if generation_config is None else {"generation_config": generation_config}
        outputs = self.llm.generate(prompts if ids is None else ids, **how)
        if request_ids is not None:
            outputs = [output for _, output in sorted(zip(request_ids, outputs, strict=True), key=lambda pair: pair[0])]
        answers = [(output.prompt_token_ids, one.token_ids) for output in outputs for one in output.outputs]
        texts = [self.llm.tokenizer.decode([*asked, *said], skip_special_tokens=True) for asked, said in answers]
        return (texts, [said for _, said in answers]) if return_token_ids else texts


class GlideLlamaConfig(SimpleNamespace):
    """Any of its fields, by name. Sizes are read from the drafter's tensors, whatever is given here."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)


class GlideLlamaForCausalLM:
    """A GLIDE drafter by its name or path."""

    @staticmethod
    def from_pretrained(name: str, *ignored: Any, config: Any = None, **named: Any) -> Any:
        """Of a config only what no tensor says."""
        given = {} if config is None else vars(config)
        return GLIDE.config(name, **{key: given[key] for key in UNSAID if key in given})
