"""A tokenizer around the `tokenizers` library, with the names users know from transformers and without its cost.

It encodes, decodes and renders chats exactly as transformers' object around the same backend. What is asked of it
beyond that (padding, tensors, offsets, …) is asked of such an object, made when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.models.chat import render

LONG = 10_000  # characters from which on a text is read as a batch: meanwhile other threads go on
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Encoded(dict[str, Any]):
    """`input_ids` and `attention_mask`, by key or as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Tokenizer:
    """backend: a `tokenizers.Tokenizer`. named: special tokens by their names in transformers. transformers: makes the
    object that can do the rest. It is a copy: names that are set here are set there too, and tokens cannot be added."""

    is_fast = True
    clean_up_tokenization_spaces = False
    chat_template: str | None

    def __init__(
        self, backend: Any, named: Mapping[str, str], chat_template: str | None, transformers: Callable[[], Any]
    ) -> None:
        kept = {"backend_tokenizer": backend, "chat_template": chat_template, "_make": transformers, "_made": None}
        self.__dict__.update(kept, special_tokens_map={name: named[name] for name in NAMES if name in named}, _set={})

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "add_tokens", "add_special_tokens", "train_", "push_")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        token = name.removesuffix("_id")
        if token not in NAMES:
            return getattr(self._transformers(), name)
        found = self.special_tokens_map.get(token)
        return found if found is None or token == name else self.backend_tokenizer.token_to_id(found)

    def __setattr__(self, name: str, value: Any) -> None:
        """As with transformers: `pad_token = …` and `pad_token_id = …` are one."""
        token = name.removesuffix("_id")
        if token in NAMES:
            if token != name and value is not None:
                value = self.backend_tokenizer.id_to_token(value)
            self.special_tokens_map[token] = value
            if value is None:
                del self.special_tokens_map[token]
            name = token
        else:
            self.__dict__[name] = value
        self._set[name] = value
        if self._made is not None:
            setattr(self._made, name, value)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, **options: Any) -> Any:
        """Input ids and attention mask of a text, or of each text of a list."""
        texts = [text] if isinstance(text, str) else text
        if options or not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            return self._transformers()(text, add_special_tokens=add_special_tokens, **options)
        ids = [self.encode(one, add_special_tokens) for one in texts]
        masks = [[1] * len(one) for one in ids]
        return (
            Encoded(input_ids=ids[0], attention_mask=masks[0])
            if isinstance(text, str)
            else Encoded(input_ids=ids, attention_mask=masks)
        )

    def encode(self, text: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        if options or not isinstance(text, str):
            return self._transformers().encode(text, add_special_tokens=add_special_tokens, **options)
        if len(text) < LONG:
            return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of an id or of several; of a list of lists, a list of texts."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if options or not isinstance(ids, int | list | tuple):
            return self._transformers().decode(ids, skip_special_tokens=skip_special_tokens, **options)
        if isinstance(ids, int):
            ids = [ids]
        if ids and isinstance(ids[0], list | tuple):
            return [self.decode(one, skip_special_tokens) for one in ids]
        return self.backend_tokenizer.decode([int(one) for one in ids], skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        return [self.decode(one, skip_special_tokens, **options) for one in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        tokens: list[str] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).tokens
        return tokens

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def vocab_size(self) -> int:
        """Without added tokens."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        added: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: index for index, token in sorted(self.added_tokens_decoder.items())}

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.backend_tokenizer.token_to_id(token) for token in self.all_special_tokens]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """A token's id; of one that is not there the unknown token's, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return [self.backend_tokenizer.id_to_token(int(one)) for one in ids if int(one) not in skipped]

    def apply_chat_template(
        self,
        conversation: Any,
        tools: list[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """A conversation as a prompt: its text (tokenize=False), or what `__call__` makes of that text."""
        template = self.chat_template if chat_template is None else chat_template
        single = isinstance(conversation, list | tuple) and conversation and isinstance(conversation[0], Mapping)
        described = tools is None or all(isinstance(tool, dict) for tool in tools)  # functions are described there
        if not single or not described or template is None or _BEYOND & options.keys():
            asked = {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt, **options}
            return self._transformers().apply_chat_template(conversation, tools=tools, tokenize=tokenize, **asked)
        whole = options.pop("return_dict", True)
        names = {"documents": None, **self.special_tokens_map, **options}
        names |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        text = render(template, list(conversation), names)
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if whole else encoded["input_ids"]

    def _transformers(self) -> Any:
        if self._made is None:
            self.__dict__["_made"] = self._make()
            for name, value in self._set.items():
                setattr(self._made, name, value)
        return self._made


# What is left to transformers' own.
_BEYOND = {
    *("continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
