"""The parts of a decoder layer (linear, embedding, RMSNorm, attention projections, SwiGLU, experts) and the layer itself.

Leading axes are free ([T, D] packed for serving, [B, S, D] for training) and attention is a callback, so that serving and
training run the same code. Layers with the same sizes, window and kind of MLP have equal graph definitions, so that one inner jit,
traced once, can serve them all.

Weights are in the parameters' dtype, norms and the rotary embedding compute in float32, matmuls give the activations'
dtype. Axis letters: D model, N query heads, K KV heads, H head_dim, F ffn, V vocabulary, E experts.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.row_tiles import MapRows, RowTiles, whole
from jaxserve.parallel.shard import ALONE, Shard
from kernels.checks import Shapes
from kernels.fused_matmul.xla import silu_gated
from kernels.grouped_matmul import combine_rows, gather_rows, grouped_matmul, plan_groups
from kernels.rotary_write.xla import rms_normalize, split_heads

# attend(q[..., N, H], k[..., K, H], v[..., K, H]) -> (o[..., N, H], kv): causal attention of the batch's layout. kv is
# whatever the layout keeps (the layer's updated KV pages, or None); the layer hands it through.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
RopeAngles = tuple[jax.Array, jax.Array]  # cos, sin: f32[..., H/2]
# attend_heads(qkv[T, N + 2K, H], rope, norms) -> as Attend: the same from heads as the projection gives them. It norms queries and
# keys and rotates them itself. norms: (q_scale[H], k_scale[H], eps), or None for a model without.
HeadNorms = tuple[jax.Array, jax.Array, float] | None
AttendHeads = Callable[[jax.Array, RopeAngles, HeadNorms], tuple[jax.Array, Any]]


class Fused(NamedTuple):
    """Matmuls of x[T, D] together with what stands around them. matmul: kernels.fused_matmul of some backend; it takes the norms
    before a layer's projections and the gate of its MLP. residuals: the additions to the residual stream too. any_layout: it takes
    matrices [out, in] and the head's too, whose products stay float32."""

    matmul: Callable[..., jax.Array]
    residuals: bool = False
    any_layout: bool = False

    def of_rows(self, num_rows: jax.Array) -> Self:  # i32[]
        """The same for rows of which those from num_rows on are padding."""
        return self._replace(matmul=functools.partial(self.matmul, num_rows=num_rows))


INIT_STD = 0.02
FEW_ROWS = {2: 16, 4: 64}  # by bytes a number: rows up to which XLA:CPU is faster with the weight on the left (benchmarks/cpu)


class Linear(nnx.Module):
    """x[..., in] @ kernel[in, out] (+ bias[out]). join: makes the product of those of all devices, before the bias is added."""

    def __init__(self, in_dim: int, out_dim: int, *, use_bias: bool, rngs: nnx.Rngs, param_dtype: Any):
        self.kernel: nnx.Param[jax.Array] = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (in_dim, out_dim), param_dtype))
        self.bias: nnx.Param[jax.Array] | None = nnx.Param(jnp.zeros((out_dim,), param_dtype)) if use_bias else None

    def __call__(self, x: jax.Array, join: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
        y = join(x @ self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


class TransposedLinear(nnx.Module):
    """x[..., in] @ weight[out, in].T (+ bias[out]): a `Linear` whose matrix lies as a CPU reads it fastest."""

    def __init__(self, weight: Any, bias: nnx.Param[jax.Array] | None):
        self.weight: nnx.Param[jax.Array] = nnx.Param(weight)
        self.bias: nnx.Param[jax.Array] | None = bias

    def __call__(self, x: jax.Array, join: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
        y = join(matmul_transposed(x, self.weight[...]))
        return y if self.bias is None else y + self.bias[...]


AnyLinear = Linear | TransposedLinear


def transposed(linear: AnyLinear) -> AnyLinear:
    """A linear as a `TransposedLinear`, abstract where it is."""
    if isinstance(linear, TransposedLinear):
        return linear
    kernel: Any = linear.kernel.get_value()
    is_abstract = isinstance(kernel, jax.ShapeDtypeStruct)
    return TransposedLinear(jax.ShapeDtypeStruct(kernel.shape[::-1], kernel.dtype) if is_abstract else kernel.T, linear.bias)


def matmul_transposed(
    x: jax.Array,  # [..., in]
    weight: jax.Array,  # [out, in]
    dtype: Any = None,  # of the result; the operands' by default
) -> jax.Array:  # [..., out]
    """x @ weight.T, for CPUs.

    XLA:CPU's matmuls repack their right operand at every call, which is most of the time where x has few rows; the left one they
    read as it lies. So the weight goes to the left there, behind a barrier, since XLA would turn it around again.
    """
    num_rows = math.prod(x.shape[:-1])
    if num_rows > FEW_ROWS[weight.dtype.itemsize]:
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
    rows = x.reshape(num_rows, x.shape[-1])
    y = jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], len(weight))


class Embedding(nnx.Module):
    """A table [V, D], looked up by token id; also the logits' weights where embeddings are tied."""

    def __init__(self, vocab_size: int, dim: int, *, rngs: nnx.Rngs, param_dtype: Any):
        table = INIT_STD * jax.random.normal(rngs.params(), (vocab_size, dim), param_dtype)
        self.embedding: nnx.Param[jax.Array] = nnx.Param(table)

    def __call__(self, token_ids: jax.Array, shard: Shard = ALONE) -> jax.Array:  # i32[...] -> [..., D]
        return shard.look_up(self.embedding[...], token_ids)


def vocabulary_logits(
    x: jax.Array,  # [..., D]
    weight: jax.Array,  # [V, D] or [D, V]; V may be a part of the vocabulary
    vocab_axis: int,
) -> jax.Array:  # f32[..., V]
    """Logits of normed hidden states, accumulated and returned in float32."""
    contract = (((x.ndim - 1,), (1 - vocab_axis,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis (arXiv:1910.07467): normalised in float32, cast back, then scaled."""

    def __init__(self, dim: int, eps: float, *, param_dtype: Any):
        self.scale: nnx.Param[jax.Array] = nnx.Param(jnp.ones((dim,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_normalize(x, self.eps) * self.scale[...]


class Attention(nnx.Module):
    """Projections of grouped-query attention (arXiv:2305.13245), with optional biases and RMSNorm of each query and key
    head.

    qkv_proj/kernel is [D, (N + 2K) * H] (/weight its transpose): all query heads, then the key heads, then the value heads.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads: int = N
        self.num_kv_heads: int = K
        self.head_dim: int = H
        self.group_size: int = N // K  # query heads of a KV head that are computed together; more than N / K: `fill_groups`
        self.query_places: tuple[int, ...] | None = None  # where the model's query heads are among those of all devices, by number
        self.qkv_proj: AnyLinear = Linear(D, (N + 2 * K) * H, use_bias=config.qkv_bias, rngs=rngs, param_dtype=param_dtype)
        self.o_proj: AnyLinear = Linear(N * H, D, use_bias=config.o_bias, rngs=rngs, param_dtype=param_dtype)
        self.q_norm: RMSNorm | None = RMSNorm(H, config.rms_norm_eps, param_dtype=param_dtype) if config.qk_norm else None
        self.k_norm: RMSNorm | None = RMSNorm(H, config.rms_norm_eps, param_dtype=param_dtype) if config.qk_norm else None

    def heads(self, x: jax.Array, norm: RMSNorm, fused: Fused | None = None) -> jax.Array:  # [..., D] -> [..., N + 2K, H]
        """Query, key and value heads as they are projected from the normed rows."""
        with jax.named_scope("qkv"):
            qkv = normed_linear(norm, self.qkv_proj, x, fused)
            return qkv.reshape(*x.shape[:-1], self.num_heads + 2 * self.num_kv_heads, self.head_dim)

    @property
    def norms(self) -> HeadNorms:
        """Of query and key heads."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.scale[...], self.k_norm.scale[...], self.q_norm.eps

    def project(
        self, x: jax.Array, norm: RMSNorm, rope: RopeAngles, fused: Fused | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q[..., N, H], k[..., K, H] and v[..., K, H] of x[..., D], normed first."""
        qkv = self.heads(x, norm, fused)
        q_scale, k_scale, eps = self.norms or (None, None, 0.0)
        with jax.named_scope("rope"):
            return split_heads(qkv, self.num_kv_heads, *rope, q_scale, k_scale, eps=eps)

    def fill_groups(self, q: jax.Array) -> jax.Array:  # [..., N, H] -> [..., K * group_size, H]
        """Query heads with zeros for those of a KV head that are on other devices: attention has one shape a KV head then."""
        K, H, share = self.num_kv_heads, self.head_dim, self.num_heads // self.num_kv_heads
        if share == self.group_size:
            return q
        groups = q.reshape(*q.shape[:-2], K, share, H)
        padding = [(0, 0)] * (groups.ndim - 2) + [(0, self.group_size - share), (0, 0)]
        return jnp.pad(groups, padding).reshape(*q.shape[:-2], -1, H)

    def empty_groups(self, o: jax.Array) -> jax.Array:  # [..., K * group_size, H] -> [..., N, H]
        """The way back."""
        K, H, share = self.num_kv_heads, self.head_dim, self.num_heads // self.num_kv_heads
        if share == self.group_size:
            return o
        return o.reshape(*o.shape[:-2], K, self.group_size, H)[..., :share, :].reshape(*o.shape[:-2], -1, H)

    def add_output(
        self, x: jax.Array, o: jax.Array, fused: Fused | None = None, shard: Shard = ALONE
    ) -> jax.Array:  # [..., D], [..., N, H] -> [..., D]
        """x with the output projection of all heads added. o: of the shard's own rows."""
        with jax.named_scope("o_proj"):
            heads = shard.columns(o.reshape(*o.shape[:-2], self.num_heads * self.head_dim))
            if shard.whole_sums and self.query_places != tuple(range(self.num_heads * shard.size)):
                heads = heads.reshape(*o.shape[:-2], -1, self.head_dim)[..., jnp.array(self.query_places), :]
                heads = heads.reshape(*o.shape[:-2], -1)
            if shard.groups > 1:
                return x + self.o_proj(heads, shard.sum_rows)
            return linear_onto(x, self.o_proj, heads, fused, shard)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), arXiv:2002.05202; gate_up_proj/kernel is [D, 2F] (/weight its transpose): gate, then up."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        D, F = config.hidden_size, config.intermediate_size
        self.gate_up_proj: AnyLinear = Linear(D, 2 * F, use_bias=config.mlp_bias, rngs=rngs, param_dtype=param_dtype)
        self.down_proj: AnyLinear = Linear(F, D, use_bias=config.mlp_bias, rngs=rngs, param_dtype=param_dtype)

    def add(
        self, x: jax.Array, norm: RMSNorm, fused: Fused | None = None, shard: Shard = ALONE
    ) -> jax.Array:  # [..., D] -> [..., D]
        """x with the MLP of the normed rows added."""
        hidden = shard.columns(normed_linear(norm, self.gate_up_proj, x, fused, gated=True))
        return linear_onto(x, self.down_proj, hidden, fused, shard)


class StackedLinear(nnx.Module):
    """A matrix for each expert, kernel[E, in, out], for `grouped_matmul`."""

    def __init__(self, num_experts: int, in_dim: int, out_dim: int, *, rngs: nnx.Rngs, param_dtype: Any):
        matrices = INIT_STD * jax.random.normal(rngs.params(), (num_experts, in_dim, out_dim), param_dtype)
        self.kernel: nnx.Param[jax.Array] = nnx.Param(matrices)


class SparseMLP(nnx.Module):
    """A mixture of SwiGLU experts (arXiv:1701.06538, arXiv:2505.09388): each token goes to the experts that its router's softmax
    ranks highest, and gets their outputs' sum weighted by it.

    gate_up_proj/kernel is [E, D, 2F]: gate, then up; down_proj/kernel [E, F, D]. Router logits and weights are float32.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        D, F, E = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.num_experts_per_token: int = config.num_experts_per_token
        self.norm_topk_prob: bool = config.norm_topk_prob
        self.router: Linear = Linear(D, E, use_bias=False, rngs=rngs, param_dtype=param_dtype)
        self.gate_up_proj: StackedLinear = StackedLinear(E, D, 2 * F, rngs=rngs, param_dtype=param_dtype)
        self.down_proj: StackedLinear = StackedLinear(E, F, D, rngs=rngs, param_dtype=param_dtype)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, D] -> f32[T, k], i32[T, k]
        """(weights, experts) of each token, likeliest first."""
        with jax.named_scope("route"):
            logits = jnp.dot(x, self.router.kernel[...], preferred_element_type=jnp.float32)
            weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.num_experts_per_token)
            if self.norm_topk_prob:
                weights = weights / weights.sum(axis=-1, keepdims=True)
            return weights, experts

    def __call__(
        self,
        x: jax.Array,  # [..., D]
        num_tokens: jax.Array | None = None,  # i32[], or i32[groups]
        backend: str = "auto",
        map_rows: MapRows = whole,
        shard: Shard = ALONE,
    ) -> jax.Array:  # [..., D]
        """num_tokens: tokens from here on, in the order of x, are padding: they reach no expert and get zeros. Of a shard of
        several groups, one number for each group's part of x. backend: of kernels.grouped_matmul. map_rows: how rows are computed;
        tiles of the grouped matmul have one size then too. shard: whose part of the experts' weights these are."""
        tokens = x.reshape(-1, x.shape[-1])
        gate_up, down = self.gate_up_proj.kernel[...], self.down_proj.kernel[...]
        padding = None
        if num_tokens is not None and shard.groups > 1:
            padding, num_tokens = _padding_of_parts(num_tokens, len(tokens)), None
        weights, experts = map_rows(self.route, tokens, num_rows=num_tokens)
        plan = functools.partial(plan_groups, num_tokens=num_tokens, backend=backend)
        if not shard.is_alone:
            experts = experts - shard.start(len(gate_up))
            experts = experts if padding is None else jnp.where(padding[:, None], -1, experts)  # nobody's
            plan = functools.partial(plan, num_groups=len(gate_up) * shard.size)
        groups = plan(experts, (gate_up, down), block_rows=map_rows.rows if isinstance(map_rows, RowTiles) else None)
        rows = gather_rows(tokens, groups)
        if map_rows is whole:
            hidden = grouped_matmul(rows, gate_up, groups, gated=True)
        else:
            hidden = map_rows(silu_gated, grouped_matmul(rows, gate_up, groups))
        y = grouped_matmul(hidden, down, groups)
        # Where bits must not follow shapes, each device has a token's rows of all and sums them in the order of its choices.
        separate = map_rows is whole and not shard.whole_sums
        join = None if separate else lambda *rows: jax.lax.optimization_barrier((shard.only(rows[0]), shard.any(rows[1])))
        combine = lambda row, weights: combine_rows(y, dataclasses.replace(groups, row=row), weights, join)  # noqa: E731
        combined = map_rows(combine, groups.row, weights, num_rows=num_tokens)
        return (combined if join else shard.sum(combined)).reshape(x.shape)


def _padding_of_parts(num_tokens: jax.Array, T: int) -> jax.Array:  # i32[groups] -> bool[T]
    """Which of T rows are padding, where they are equal parts with so many tokens each."""
    groups = len(num_tokens)
    return (jnp.arange(T // groups)[None] >= num_tokens[:, None]).reshape(T)


def normed_linear(norm: RMSNorm, linear: AnyLinear, x: jax.Array, fused: Fused | None, *, gated: bool = False) -> jax.Array:
    """linear(norm(x)); where gated, silu of its first half of columns times the second half."""
    if fused is None:
        y = linear(norm(x))
        return silu_gated(y) if gated else y
    kernel, layout = _matrix(linear)
    return fused.matmul(x, kernel, **layout, scale=norm.scale[...], eps=norm.eps, gated=gated)


def linear_onto(
    residual: jax.Array, linear: AnyLinear, x: jax.Array, fused: Fused | None = None, shard: Shard = ALONE
) -> jax.Array:
    """residual + linear(x), whose matrix is cut over the shards. x: what the shard has of it, or all where sums are whole."""
    D = residual.shape[-1]
    if fused is None or not fused.residuals or not (shard.is_alone or shard.whole_sums):
        return residual + linear(x, lambda y: shard.product(y, D))
    kernel, layout = _matrix(linear)
    num_columns = kernel.shape[0 if "transposed" in layout else 1]
    part = lambda x: shard.part(x, x.ndim - 1, num_columns)  # noqa: E731
    layout["bias"] = None if layout["bias"] is None else part(layout["bias"])
    return shard.columns(fused.matmul(x, kernel, **layout, residual=part(residual)), D)


def plain_linear(linear: AnyLinear, x: jax.Array, fused: Fused | None = None, dtype: Any = None) -> jax.Array:
    """linear(x), by what computes fused matmuls where that takes any layout and x is [T, in]. dtype: of the result where it is not
    x's: float32, of a linear without a bias."""
    kernel, layout = _matrix(linear)
    if fused is not None and fused.any_layout:
        return fused.matmul(x, kernel, **layout, dtype=dtype)
    if dtype is None:
        return linear(x)
    assert linear.bias is None
    return matmul_transposed(x, kernel, dtype) if "transposed" in layout else jnp.dot(x, kernel, preferred_element_type=dtype)


def _matrix(linear: AnyLinear) -> tuple[jax.Array, dict[str, Any]]:
    """The matrix as it lies; how it lies, and its bias, as arguments of a fused matmul."""
    bias = None if linear.bias is None else linear.bias[...]
    if isinstance(linear, TransposedLinear):
        return linear.weight[...], {"bias": bias, "transposed": True}
    return linear.kernel[...], {"bias": bias}


class DecoderLayer(nnx.Module):
    """Pre-norm attention and an MLP with residuals. `sliding_window` (tokens or None) is for `attend` to honour; a sparse layer's
    MLP is a mixture of experts."""

    def __init__(self, config: ModelConfig, sliding_window: int | None, *, sparse: bool = False, rngs: nnx.Rngs, param_dtype: Any):
        self.sliding_window = sliding_window
        self.attention_norm: RMSNorm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.attention: Attention = Attention(config, rngs=rngs, param_dtype=param_dtype)
        self.mlp_norm: RMSNorm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.mlp: SparseMLP | SwiGLU = (SparseMLP if sparse else SwiGLU)(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self,
        x: jax.Array,  # [..., D]
        rope: RopeAngles,
        attend: Attend,
        *,
        num_tokens: jax.Array | None = None,  # i32[], or i32[groups]
        moe_backend: str = "auto",
        map_rows: MapRows = whole,
        attend_heads: AttendHeads | None = None,
        fused: Fused | None = None,
        shard: Shard = ALONE,
    ) -> tuple[jax.Array, Any]:
        """The layer's output, [..., D], and the kv that attend returned. num_tokens and moe_backend: what `SparseMLP` is told;
        a dense layer computes its padding too, unless `fused` knows of it. map_rows: how all but attention is computed, over
        x[T, D]. attend_heads: what is called in place of attend, where it is given. fused: what computes the matmuls of x[T, D] in
        place of the norms, matrices and gates one by one. shard: whose part of the layer this is; x is whole on every device. Where
        it attends in groups, rope and what attend is given are of the rows of its own group alone.

        Raises ValueError if x's last axis is not D, or the angles' not H / 2.
        """
        shapes = Shapes(D=self.attention_norm.scale.get_value().shape[0], half_H=self.attention.head_dim // 2)
        shapes.check("x", x, "... D")
        for name, angle in zip(("cos", "sin"), rope, strict=True):
            shapes.check(name, angle, "... half_H", jnp.float32)

        def project(x: jax.Array, *rope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            return self.attention.project(x, self.attention_norm, (rope[0], rope[1]), fused)

        with jax.named_scope("attention"):
            own = shard.own_rows(x)
            if attend_heads is not None:
                qkv = map_rows(lambda x: self.attention.heads(x, self.attention_norm, fused), own, num_rows=num_tokens)
                with jax.named_scope("attend"):
                    o, kv = attend_heads(qkv, rope, self.attention.norms)
            else:
                q, k, v = map_rows(project, own, *rope, num_rows=num_tokens)
                with jax.named_scope("attend"):
                    o, kv = attend(self.attention.fill_groups(q), k, v)
                    o = self.attention.empty_groups(o)
        if isinstance(self.mlp, SwiGLU):
            return map_rows(functools.partial(self._finish, fused, shard), x, o, num_rows=num_tokens), kv
        x, normed = map_rows(functools.partial(self._add_attention, fused, shard), x, o, num_rows=num_tokens)
        with jax.named_scope("mlp"):
            return x + self.mlp(normed, num_tokens, moe_backend, map_rows, shard), kv

    def _add_attention(self, fused: Fused | None, shard: Shard, x: jax.Array, o: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x[..., D] with the attention's output o[..., N, H] in it, and its norm for the experts."""
        with jax.named_scope("attention"):
            x = self.attention.add_output(x, o, fused, shard)
        with jax.named_scope("mlp"):
            return x, self.mlp_norm(x)

    def _finish(self, fused: Fused | None, shard: Shard, x: jax.Array, o: jax.Array) -> jax.Array:
        """The layer's output, where the MLP is dense."""
        assert isinstance(self.mlp, SwiGLU)
        with jax.named_scope("attention"):
            x = self.attention.add_output(x, o, fused, shard)
        with jax.named_scope("mlp"):
            return self.mlp.add(x, self.mlp_norm, fused, shard)


def causal_attention(
    q: jax.Array,  # [B, S, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H]
    *,
    sliding_window: int | None = None,
) -> jax.Array:
    """Plain causal attention over whole sequences, [B, S, N, H]: float32 softmax, scale H**-0.5, S x S scores in
    memory.

    With a sliding window w, position q sees the w positions q - w < k <= q. Raises ValueError if the shapes disagree.
    """
    shapes = Shapes()
    shapes.check("q", q, "B S N H")
    shapes.check("k", k, "B S K H")
    shapes.check("v", v, "B S K H")
    B, S, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, S, K, N // K, H)
    scores = jnp.einsum("BQKGH,BSKH->BKGQS", grouped, k, preferred_element_type=jnp.float32) * H**-0.5
    distance = jnp.arange(S)[:, None] - jnp.arange(S)[None, :]  # query position - key position
    visible = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("BKGQS,BSKH->BQKGH", weights, v).reshape(B, S, N, H)
