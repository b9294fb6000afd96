"""Bytes of activations that mixers other than attention keep for the backward pass."""

from __future__ import annotations

from isthmus.families.architecture import Architecture, Mixer

_CHUNK, _BLOCK = 128, 64
"""Tokens between the states that the scans of Mamba-2 and Mamba-1 save."""


def mixer_terms(
    architecture: Architecture, mixer: Mixer, *, num_tokens: int, bytes_per_element: int, tp: int, recomputed: bool
) -> dict[str, int]:
    """Activation bytes of a mixer for T = ``num_tokens`` tokens, by part, all divided by tp.

    In elements, the outputs of the input projection and of the convolution, and the input of the output projection. In
    float32, the time steps (twice with Mamba-1, three times with Mamba-2), the output of the scan and its states, one
    in 128 tokens or, of Mamba-1, in 64. Ranks that share a group of Mamba-2 heads have copies of its B and C.
    ``recomputed`` (``core_attn``) keeps only the first and the last. Delta nets keep only the outputs of the
    projections of their input, and the input of the output projection.

    Raises:
        ValueError: the mixer is not known here.
    """
    a, float32 = architecture, 0
    if mixer == "mamba2" and (two := a.mamba2) is not None:
        inner, groups = two.num_heads * two.head_dim, two.num_groups * two.state_size
        projected, convolved = 2 * inner + 2 * groups + two.num_heads, inner + 2 * groups
        convolved += 2 * two.state_size * tp if tp > two.num_groups else 0
        float32 = num_tokens * (3 * two.num_heads + inner) + -(-num_tokens // _CHUNK) * inner * two.state_size
    elif mixer == "mamba" and (mamba := a.mamba) is not None:
        inner = convolved = mamba.inner_size
        projected = 2 * inner
        # The selected time steps, B and C are small, and not divided by tp.
        selected = 4 * tp * (mamba.time_step_rank + 2 * mamba.state_size)
        float32 = num_tokens * (3 * inner + selected) + -(-num_tokens // _BLOCK) * inner * mamba.state_size
    elif mixer == "short_convolution":
        inner = a.hidden_size
        projected, convolved = 3 * inner, 2 * inner
    elif (delta := a.delta_net) is not None:
        inner, convolved = delta.value_width, 0
        decays = delta.num_value_heads if mixer == "gated_delta_net" else delta.key_width
        projected = 2 * (delta.key_width + inner) + delta.num_value_heads + decays
    else:
        raise ValueError(f"the activations of {mixer} are not known")
    terms = {
        f"{mixer}: outer projections": num_tokens * (projected + inner) // tp * bytes_per_element,
        f"{mixer}: convolution": num_tokens * convolved // tp * bytes_per_element,
        f"{mixer}: float32": 4 * float32 // tp,
    }
    return {
        name: size for name, size in terms.items() if name.endswith("projections") or not recomputed or "delta" in mixer
    }


def mixer_buffers(architecture: Architecture, mixer: Mixer, *, num_tokens: int, bytes_per_element: int, tp: int) -> int:
    """Upper bound of the temporary elements in a mixer's backward pass: gradients of what it keeps, and a chunk."""
    terms = mixer_terms(
        architecture, mixer, num_tokens=num_tokens, bytes_per_element=bytes_per_element, tp=tp, recomputed=False
    )
    chunk = 0
    if mixer == "mamba2" and (two := architecture.mamba2) is not None:
        length = min(_CHUNK, num_tokens)
        chunk = 6 * 4 * length * two.num_heads * (length + two.head_dim + two.state_size) // tp
    elif mixer == "mamba" and (mamba := architecture.mamba) is not None:
        chunk = 6 * 4 * min(_BLOCK, num_tokens) * mamba.inner_size * mamba.state_size // tp
    elif (delta := architecture.delta_net) is not None:
        # In float32, with gradients: about 8 tensors like keys, 6 like values and 8 of pairs in chunks of 64 tokens,
        # states; with decays of channels, about 10 like keys for each of 6 halvings of a chunk.
        keys, values = delta.key_head_dim, delta.value_head_dim
        head_elements = (8 if mixer == "gated_delta_net" else 68) * keys + 6 * values + 8 * 64 + keys * values // 64
        chunk = 2 * 4 * num_tokens * delta.num_value_heads * head_elements // tp
    return (sum(terms.values()) + chunk) // bytes_per_element
