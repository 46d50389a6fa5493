"""Strict reader of config.json, in every published spelling, into one ModelConfig. Knows nothing of weights or tokens.

What is read, what is refused: sizes that are missing are named; a value that would change the mathematics in a way
this program does not compute is refused by name; keys known to matter only in training or for images are ignored.
All problems of one file are reported together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from boleinfer.supported import ARCHITECTURE_TYPE, ONLY, OTHER_HYBRIDS, SUPPORTED, TEXT_TYPE

_ROPE_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


class ConfigError(ValueError):
    """A config.json that is missing, broken, incomplete, or of a model that this program does not compute."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first `rotary_dim` of a head's dimensions, plain or YaRN (arXiv 2309.00071).

    All fields are resolved: `attention_factor` multiplies cos and sin (1.0 when plain); `factor` and the fields after
    it are neutral when `rope_type` is "default".
    """

    rope_type: str  # "default" or "yarn"
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def inv_freq(self) -> np.ndarray:
        """Angle per position of each rotated pair: float64 [rotary_dim/2], theta^(-2j/rotary_dim).

        YaRN divides the slow pairs by `factor`, keeps the quick ones, and blends linearly between the pair that turns
        `beta_fast` times and the one that turns `beta_slow` times over the original context.
        """
        dim = self.rotary_dim
        plain = self.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)  # [dim/2]
        if self.rope_type == "default":
            return plain
        low, high = (self._pair_turning(turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 1e-3
        slow = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)  # [dim/2] 0 = quick pair, 1 = slow pair
        return plain * (1 - slow) + plain / self.factor * slow

    def _pair_turning(self, turns: float) -> float:
        """The (fractional) index of the pair that makes `turns` full turns over the original context."""
        wavelengths = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(wavelengths) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class ModelConfig:
    """One text model, normalised: equal models give equal objects whatever the spelling of their config.json."""

    model_type: str  # a key of SUPPORTED
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]  # "linear_attention" or "full_attention", one per layer
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    intermediate_size: int  # 0 in a mixture of experts
    num_experts: int  # 0 when dense, and so are the next three
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    rms_norm_eps: float
    tie_word_embeddings: bool
    mtp_num_hidden_layers: int  # announced by the file; the tensors decide whether it can be used
    max_position_embeddings: int  # longest context in tokens, YaRN's extension included
    dtype: str
    eos_token_ids: tuple[int, ...]  # of config.json alone, ascending
    quantization: str | None  # None or "fp8" (blocks of 128 x 128)


def read_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Read a config.json (a mapping, the file, or the folder that holds it) into a ModelConfig.

    Raises ConfigError naming everything that is missing, malformed or not supported.
    """
    if isinstance(source, Mapping):
        raw, where = source, "config"
    else:
        raw, where = _load(Path(source))
    reader = _Reader(raw, where)
    config = reader.model()
    if reader.problems:
        raise ConfigError(f"{where} cannot be used:\n  " + "\n  ".join(reader.problems))
    return config


def _load(path: Path) -> tuple[Mapping[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"no {file.name} found: {file} does not exist; a model is a folder with a config.json"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ConfigError(f"{file} is not valid JSON ({error}); the file may be cut short, fetch it again") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds a JSON {type(raw).__name__}, expected an object with the model's sizes")
    return raw, str(file)


class _Reader:
    """Looks keys up in `text_config` first and in the outer object second, and collects what is wrong."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        inner = raw.get("text_config")
        self.outer, self.where = raw, where
        self.levels = [inner, raw] if isinstance(inner, Mapping) else [raw]
        self.problems: list[str] = []
        self.model_type = self._model_type()

    def model(self) -> ModelConfig:
        moe = self.model_type != "qwen3_5_text"
        self._refuse_other_maths()
        layers = self.count("num_hidden_layers")
        max_position = self.count("max_position_embeddings")
        head_dim = self.count("head_dim")
        rope = self._rope(head_dim, max_position)
        config = ModelConfig(
            model_type=self.model_type,
            vocab_size=self.count("vocab_size"),
            hidden_size=self.count("hidden_size"),
            num_hidden_layers=layers,
            layer_types=self._layer_types(layers),
            num_attention_heads=self.count("num_attention_heads"),
            num_key_value_heads=self.count("num_key_value_heads"),
            head_dim=head_dim,
            rope=rope,
            linear_num_key_heads=self.count("linear_num_key_heads"),
            linear_num_value_heads=self.count("linear_num_value_heads"),
            linear_key_head_dim=self.count("linear_key_head_dim"),
            linear_value_head_dim=self.count("linear_value_head_dim"),
            linear_conv_kernel_dim=self.count("linear_conv_kernel_dim"),
            intermediate_size=0 if moe else self.count("intermediate_size"),
            num_experts=self.count("num_experts") if moe else 0,
            num_experts_per_tok=self.count("num_experts_per_tok") if moe else 0,
            moe_intermediate_size=self.count("moe_intermediate_size") if moe else 0,
            shared_expert_intermediate_size=self.count("shared_expert_intermediate_size") if moe else 0,
            norm_topk_prob=self.flag("norm_topk_prob", True) if moe else False,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=any(level.get("tie_word_embeddings") is True for level in self.levels),
            mtp_num_hidden_layers=self._mtp_layers(),
            max_position_embeddings=max(max_position, int(rope.factor * rope.original_max_position_embeddings)),
            dtype=str(self.get("dtype", "torch_dtype") or "bfloat16").removeprefix("torch."),
            eos_token_ids=self._eos(),
            quantization=self._quantization(),
        )
        if not self.problems:
            self._check_sizes(config)
        return config

    # ---- lookups -------------------------------------------------------------------------------------------------

    def get(self, *keys: str) -> Any:
        """The first value that is not null: inner level before outer, keys in the given order."""
        return next((level[k] for level in self.levels for k in keys if level.get(k) is not None), None)

    def count(self, key: str) -> int:
        value = self.get(key)
        if value is None:
            self.problems.append(f"{key} is missing")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problems.append(f"{key} is {value!r}, expected a whole number of at least 1")
        else:
            return value
        return 1

    def number(self, key: str, default: float) -> float:
        return self._positive(key, self.get(key), default)

    def _positive(self, name: str, value: Any, default: float) -> float:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.problems.append(f"{name} is {value!r}, expected a positive number")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key} is {value!r}, expected true or false")
            return default
        return default if value is None else value

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _model_type(self) -> str:
        """Decide the family by model_type and architectures; raises ConfigError at once when it is not supported."""
        named = [level["model_type"] for level in self.levels if level.get("model_type") is not None]
        architectures = self.outer.get("architectures") or []
        found = {TEXT_TYPE.get(str(t)) for t in named} | {ARCHITECTURE_TYPE.get(str(a)) for a in architectures}
        if len(found) == 1 and None not in found:
            return found.pop()  # type: ignore[return-value]
        what = f"model_type {' / '.join(map(repr, named)) or 'missing'}"
        what += f", architectures {list(architectures)}" if architectures else ""
        plain = [str(t).removesuffix("_text") for t in named]
        known = next((OTHER_HYBRIDS[t] for t in plain if t in OTHER_HYBRIDS), None)
        why = f" ({known})" if known else ""
        if len(found - {None}) > 1:
            why = " (model_type and architectures name different families)"
        supported = "".join(f"\n  {kind}: {sizes}" for kind, sizes in SUPPORTED.items())
        raise ConfigError(f"{self.where} is of a model that is not supported: {what}{why}. Supported:{supported}")

    def _refuse_other_maths(self) -> None:
        for level in self.levels:
            for key, accepted in ONLY.items():
                value = level.get(key)
                if value is not None and value not in accepted:
                    wanted = " or ".join(map(repr, accepted)) or "no such key"
                    self.problems.append(f"{key} is {value!r}, which is not supported (supported: {wanted})")
            if level.get("sliding_window") is not None and level.get("use_sliding_window") is not False:
                self.problems.append(f"sliding_window is {level['sliding_window']!r}, which is not supported")
        if self.model_type == "qwen3_5_text" and self.get("num_experts") not in (None, 0):
            self.problems.append(f"num_experts is {self.get('num_experts')!r} in a dense model ({self.model_type})")
        if self.model_type == "qwen3_5_moe_text" and self.get("norm_topk_prob") not in (None, True):
            self.problems.append("norm_topk_prob is not true, which is not supported for qwen3_5_moe")

    def _layer_types(self, layers: int) -> tuple[str, ...]:
        listed = self.get("layer_types")
        if listed is None:
            interval = 4 if self.get("full_attention_interval") is None else self.count("full_attention_interval")
            return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers))
        if not isinstance(listed, list):
            self.problems.append(f"layer_types is {listed!r}, expected a list of one name per layer")
            return ()
        other = sorted({str(t) for t in listed if t not in ("linear_attention", "full_attention")})
        if other:
            self.problems.append(f"layer_types holds {', '.join(other)} (supported: linear_attention, full_attention)")
        if len(listed) != layers:
            self.problems.append(f"layer_types lists {len(listed)} layers, num_hidden_layers is {layers}")
        return tuple(map(str, listed))

    def _mtp_layers(self) -> int:
        value = self.get("mtp_num_hidden_layers", "num_nextn_predict_layers")
        if value is None:
            return 1 if self.model_type == "qwen3_next" else 0  # Qwen3-Next ships the layer without announcing it
        if isinstance(value, bool) or value not in (0, 1):
            self.problems.append(f"mtp_num_hidden_layers is {value!r}, which is not supported (supported: 0 or 1)")
            return 0
        return int(value)

    def _eos(self) -> tuple[int, ...]:
        ids: set[int] = set()
        for value in (level.get("eos_token_id") for level in self.levels):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, int) and not isinstance(item, bool):
                    ids.add(item)
                elif item is not None:
                    self.problems.append(f"eos_token_id is {value!r}, expected a token id, a list of them or null")
        return tuple(sorted(ids))

    def _quantization(self) -> str | None:
        quant = self.get("quantization_config")
        if quant is None:
            return None
        quant = quant if isinstance(quant, Mapping) else {"quant_method": quant}
        method = quant.get("quant_method", quant.get("quant_algo", quant.get("format")))
        expected = {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
        wrong = [f"{k} {quant[k]!r}" for k, v in expected.items() if quant.get(k) is not None and quant[k] != v]
        if method == "fp8" and quant.get("weight_block_size") is None:
            wrong.append("no weight_block_size")
        if method != "fp8" or wrong:
            found = ", ".join([f"quant_method {method!r}", *wrong])
            self.problems.append(
                f"quantization_config has {found}, which is not supported "
                "(supported: none, or fp8 e4m3 in blocks of [128, 128] with dynamic activations)"
            )
        return "fp8"

    def _rope(self, head_dim: int, max_position: int) -> RopeConfig:
        values = self._rope_values()
        kind = values.get("rope_type", "default")
        theta = self._positive("rope_theta", values.get("rope_theta"), 1e4)
        if "rope_theta" not in values:
            self.problems.append("rope_theta is missing (looked in rope_parameters, rope_scaling and beside them)")
        partial = self._positive("partial_rotary_factor", values.get("partial_rotary_factor"), 0.25)
        plain = RopeConfig("default", theta, int(head_dim * partial))
        if kind == "yarn":
            return self._yarn(plain, values, max_position)
        if kind not in ("default", "mrope"):  # mrope: the three position axes of a text token are equal
            self.problems.append(f"rope_type is {kind!r}, which is not supported (supported: default, yarn)")
        return plain

    def _rope_values(self) -> dict[str, Any]:
        """All rope settings: rope_scaling (older) over rope_parameters over single keys beside them; inner over outer.

        Two levels that contradict each other are a problem, since either could be meant.
        """
        found = []
        for level in self.levels:
            values = {k: level[k] for k in _ROPE_BESIDE if level.get(k) is not None}
            for group in (level.get("rope_parameters") or {}, level.get("rope_scaling") or {}):
                if not isinstance(group, Mapping):
                    self.problems.append(f"the rope settings are {group!r}, expected an object")
                    continue
                given = {k: v for k, v in group.items() if v is not None}
                older = {"rope_type": given["type"]} if "type" in given else {}
                values |= older | given
            found.append(values)
        inner, outer = found[0], found[-1]
        for key in ("rope_type", "rope_theta", "partial_rotary_factor", "factor"):
            if key in inner and key in outer and inner[key] != outer[key]:
                self.problems.append(f"{key} is {inner[key]!r} in text_config but {outer[key]!r} outside it")
        return {**outer, **inner}

    def _yarn(self, plain: RopeConfig, values: Mapping[str, Any], max_position: int) -> RopeConfig:
        if "factor" not in values and "original_max_position_embeddings" not in values:
            self.problems.append("factor is missing from the yarn rope settings")

        def value(key: str, default: float) -> float:
            return self._positive(key, values.get(key), default)

        original = value("original_max_position_embeddings", max_position)
        factor = value("factor", max_position / original)
        mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")

        def growth(scale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

        return replace(
            plain,
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=int(original),
            beta_fast=value("beta_fast", 32.0),
            beta_slow=value("beta_slow", 1.0),
            attention_factor=value(
                "attention_factor", growth(mscale) / growth(mscale_all) if mscale and mscale_all else growth(1.0)
            ),
            truncate=values.get("truncate") is not False,
        )

    def _check_sizes(self, c: ModelConfig) -> None:
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(c, many) % getattr(c, few):
                self.problems.append(f"{many} {getattr(c, many)} is not a multiple of {few} {getattr(c, few)}")
        if c.rope.rotary_dim % 2 or not 0 < c.rope.rotary_dim <= c.head_dim:
            self.problems.append(
                f"head_dim {c.head_dim} times partial_rotary_factor gives {c.rope.rotary_dim} rotated dimensions, "
                "expected an even number of at least 2 and at most head_dim"
            )
        if c.num_experts_per_tok > c.num_experts:
            self.problems.append(
                f"num_experts_per_tok {c.num_experts_per_tok} is more than num_experts {c.num_experts}"
            )
