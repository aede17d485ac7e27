"""Orthonormal rotation H of the C hidden channels, for any C, and P = H diag(d) H^T (LinearPatch, eq. 5-7).

C = 2^p m: H is the Kronecker product of Sylvester's matrix of order 2^p (eq. 5) and a Hadamard matrix of order m, and
is applied factor by factor.  With o the odd part of C, m is the first of 4o, 8o, 16o, ... that divides C and that
Paley's constructions give (J. Math. Phys. 12, 1933), or a product of such orders: Paley I, q + 1 for a prime power
q = 3 mod 4; Paley II, 2 (q + 1) for a prime power q = 1 mod 4.  Where there is none (C odd, C = 2 mod 4, and a part of
the multiples of 4: 92, 156, ...) H is the orthonormal DCT-II.

The released code takes H_m from QuaRot's tables, m the first of 172, 156, 140, 108, 60, 52, 36, 28, 40, 20, 12 that
divides C.  m is the same here, except where that is 172 or 156 (here 344 or 312, if it divides C), and the default
order "released" is that code's Kronecker order.  But H_m may be another Hadamard matrix of order m than its table, so
that H and P equal the released ones for C = 2^p only.

| hidden size C | H_m                      | 2^p  | models of this size                              |
|---------------|--------------------------|------|--------------------------------------------------|
| 576           | Paley II 36              | 16   | SmolLM2-135M                                     |
| 896           | Paley II 28              | 32   | Qwen2.5-0.5B                                     |
| 960           | Paley I 60               | 16   | SmolLM2-360M                                     |
| 1536          | Paley I 12               | 128  | Qwen2.5-1.5B                                     |
| 2048          |                          | 2048 | SmolLM2-1.7B, LLaMA-3.2-1B, Qwen2.5-3B           |
| 2560          | Sylvester 2 x Paley I 20 | 64   | Qwen3-4B                                         |
| 3072          | Paley I 12               | 256  | LLaMA-3.2-3B                                     |
| 3584          | Paley II 28              | 128  | Qwen2.5-7B, Gemma-2-9B                           |
| 4096          |                          | 4096 | LLaMA-2-7B, LLaMA-3-8B, Mistral-7B, Baichuan2-7B |
| 5120          | Sylvester 2 x Paley I 20 | 128  | LLaMA-2-13B                                      |
| 5376          | Paley I 84               | 64   | Gemma-3-27B                                      |
| 8192          |                          | 8192 | LLaMA-2-70B                                      |
"""
import math
import operator
import warnings
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import product

import torch

from utils.errors import WorkError

ORDERS = ("released", "paper")
MAX_BITS = 6     # Sylvester's matrix is applied in factors of order 64 or less: on CPU as fast as any other split
CHUNK = 1 << 19  # elements (2 MB in float32) that pass through all factors while they are in the CPU's cache


@lru_cache(maxsize=None)
def _prime_power(q):
    """(p, k) with q = p^k and p an odd prime, else None."""
    p = next((p for p in range(2, math.isqrt(q) + 1) if q % p == 0), q)
    k = round(math.log(q, p)) if p > 2 else 0
    return (p, k) if k and p ** k == q else None


@lru_cache(maxsize=None)
def _paley(order):
    """("Paley I" | "Paley II", q), primes before prime powers, or None when neither construction has this order."""
    fields = [("Paley I", order - 1)] if order % 4 == 0 else []
    fields += [("Paley II", order // 2 - 1)] if order % 8 == 4 else []
    found = [(_prime_power(q)[1], name, q) for name, q in fields if _prime_power(q)]
    return min(found)[1:] if found else None


@lru_cache(maxsize=None)
def _paley_product(order):
    """Paley orders whose product is `order`, or None.  Several small ones go before one large: cheaper to apply."""
    for a in range(12, math.isqrt(order) + 1, 4):
        if order % a == 0 and _paley(a) and _paley_product(order // a):
            return (a, *_paley_product(order // a))
    return (order,) if _paley(order) else None


def _plan(size):
    """size -> (Hadamard orders whose product is m, 2^p), or None when no construction here has this size."""
    power = size & -size
    odd = size // power
    if odd == 1:
        return (), size
    if odd == 5 and size % 8 == 0:
        return (40,), size // 40  # as in QuaRot, which tests 40 = 2 x 20 before 20
    for cofactor in (4 << i for i in range((power // 4).bit_length())):
        if _paley_product(cofactor * odd):
            return _paley_product(cofactor * odd), power // cofactor
    return None


def _quadratic_character(p, k):
    """chi over GF(p^k), int8 [p^k]: 0 at zero, 1 at squares, -1 elsewhere.  Element i has the base-p digits of i."""
    chi = torch.tensor([0] + [-1] * (p ** k - 1), dtype=torch.int8)
    if k == 1:
        chi[torch.arange(1, p) ** 2 % p] = 1
        return chi
    for low in product(range(1, p), *[range(p)] * (k - 1)):  # the ring GF(p)[x] / (x^k - low(x)) ...
        powers, element = {}, (1,) + (0,) * (k - 1)
        while element not in powers:
            powers[element] = len(powers)
            element = tuple((a + element[-1] * b) % p for a, b in zip((0,) + element[:-1], low))
        if len(powers) == p ** k - 1:  # ... is a field if x runs through all elements but 0; its even powers: squares
            chi[[sum(a * p ** i for i, a in enumerate(e)) for e, n in powers.items() if n % 2 == 0]] = 1
            return chi


def _hadamard(order):
    """Unnormalised Hadamard matrix, int8 [order, order], entries +-1; order: 2^i (Sylvester), one of Paley's, or 40."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    h2 = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    if order & (order - 1) == 0 or order == 40:
        return torch.kron(h2, _hadamard(order // 2))
    name, q = _paley(order)
    p, k = _prime_power(q)
    chi, weights = _quadratic_character(p, k), p ** torch.arange(k)
    digits = torch.arange(q)[:, None] // weights % p
    s = torch.ones(q + 1, q + 1, dtype=torch.int8)  # S S^T = q I, zero diagonal; skew for Paley I, symmetric for II
    s[0, 0] = 0
    s[1:, 1:] = torch.cat([chi[((a[:, None] - digits) % p * weights).sum(-1)] for a in digits.split(64)])
    eye = torch.eye(q + 1, dtype=torch.int8)
    if name == "Paley I":
        s[1:, 0] = -1
        return s + eye
    return torch.kron(s, h2) + torch.kron(eye, torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8))


def _dct2(size):
    """Orthonormal DCT-II, float64 [size, size]: column k holds frequency k."""
    n = torch.arange(size, dtype=torch.float64)
    h = torch.cos(torch.outer(2 * n + 1, n) * (math.pi / (2 * size))) * math.sqrt(2 / size)
    h[:, 0] = 1 / math.sqrt(size)
    return h


@dataclass(frozen=True, eq=False)
class Rotation:
    """H, [size, size] with H H^T = I, kept as Kronecker factors.  Made by `rotation(...)`."""
    size: int
    order: str
    orders: tuple       # of the Hadamard matrices whose product is H_m
    power: int          # 2^p
    construction: str   # the Kronecker factors from left to right, in words
    is_hadamard: bool   # built as a Hadamard matrix: every |H_ij| is 1/sqrt(size)
    _cache: dict = field(default_factory=dict, repr=False)

    def info(self):
        """JSON-ready description for an artifact's metadata; size and order rebuild the rotation."""
        return {name: getattr(self, name) for name in ("size", "order", "construction", "is_hadamard")}

    def factors(self):
        """CPU matrices F_1, F_2, ... with H = s F_1 (x) F_2 (x) ..., built anew by each call.

        Hadamard: int8 with entries +-1, s = 1/sqrt(size).  Else one orthonormal float64 matrix, s = 1.
        """
        bits = self.power.bit_length() - 1
        count = math.ceil(bits / MAX_BITS)
        sylvester = [_hadamard(1 << (bits + i) // count) for i in range(count)]
        parts = self._m_factors() + sylvester if self.order == "released" else sylvester + self._m_factors()
        return parts or [_hadamard(1)]

    def apply(self, x):
        """x @ H over the last axis (eq. 6: the rotated activations).

        x: [..., size], any floating dtype, strides and device.  Returns the same shape in float32 (float64 for
        float64), computed in that dtype even under autocast; differentiable.  ValueError on another last axis or a
        dtype that is not floating.  On CUDA, float32 products follow torch.backends.cuda.matmul.allow_tf32.
        """
        return self._transform(x, transposed=False)

    def apply_transposed(self, x):
        """x @ H^T over the last axis, the inverse of `apply`; arguments, result and errors as there."""
        return self._transform(x, transposed=True)

    def matrix(self, dtype=torch.float64):
        """Dense H, [size, size] on the CPU, formed in float64."""
        return reduce(torch.kron, self._on("cpu", torch.float64)).to(dtype, copy=True)

    def conjugate(self, d):
        """P = H diag(d) H^T (eq. 7): dense float32 [size, size] on d's device, formed in float64, exactly symmetric.

        d: [size], any dtype; no gradient flows back to it.  ValueError on another shape, WorkError on nan or inf.
        """
        if tuple(d.shape) != (self.size,):
            raise ValueError(f"d must have the shape [{self.size}], not {list(d.shape)}")
        scale = d.detach().to("cpu", torch.float64)
        if not scale.isfinite().all():
            raise WorkError(f"{int((~scale.isfinite()).sum())} of the {self.size} entries of d are not finite")
        p = self.apply_transposed(self.matrix() * scale)
        return ((p + p.T) / 2).to(d.device, torch.float32)

    def _m_factors(self):
        if not self.is_hadamard:
            return [_dct2(self.size)]
        built = [_hadamard(order) for order in self.orders]
        return [h.T.contiguous() for h in built] if self.order == "released" else built

    def _on(self, device, dtype, only_m=False):
        """The factors, with s in the first, or those of H_m alone, unscaled; cached for each device and dtype."""
        key = (str(device), dtype, only_m)
        if key not in self._cache:
            with torch.inference_mode(False), torch.device("cpu"):  # usable in training, whoever asks first
                parts = [f.to(device, dtype) for f in (self._m_factors() if only_m else self.factors())]
                if self.is_hadamard and not only_m:
                    parts[0] = parts[0] / math.sqrt(self.size)
                self._cache[key] = parts
        return self._cache[key]

    def _transform(self, x, transposed):
        if not x.is_floating_point():
            raise ValueError(f"a rotation takes floating-point values, not {x.dtype}")
        if x.ndim == 0 or x.shape[-1] != self.size:
            raise ValueError(f"the last axis must be the {self.size} channels of the rotation; got {list(x.shape)}")
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if x.numel() == 0:  # no kernel launch for no rows
            return x.to(dtype)
        rows = x.reshape(-1, self.size)
        with torch.autocast(x.device.type, enabled=False):
            kernel = _cuda_kernel(x.device) if dtype == torch.float32 and self.power > 1 else None
            if kernel:
                return self._with_kernel(kernel, rows.to(dtype), transposed).reshape(x.shape)
            factors = self._on(x.device, dtype)
            if x.device.type != "cpu" or len(factors) == 1:
                return _product(rows.to(dtype), factors, transposed).reshape(x.shape)
            chunks = [_product(c.to(dtype), factors, transposed) for c in rows.split(max(1, CHUNK // self.size))]
            return torch.cat(chunks).reshape(x.shape)

    def _with_kernel(self, kernel, rows, transposed):
        """The same product with kernel(rows, scale), Sylvester's transform of the last axis, for the factor 2^p."""
        m = self.size // self.power
        if self.order == "paper":  # to [N, m, 2^p], the layout of the released order, and back
            rows = rows.view(-1, self.power, m).transpose(1, 2)
        rows = kernel(rows.reshape(-1, self.power).contiguous(), 1 / math.sqrt(self.size)).reshape(-1, self.size)
        rows = _product(rows, self._on(rows.device, rows.dtype, only_m=True), transposed, right=self.power)
        return rows if self.order == "released" else rows.view(-1, m, self.power).transpose(1, 2)


def _product(rows, factors, transposed, right=1):
    """rows @ (F_1 (x) F_2 (x) ... (x) I_right), or with the transpose: [N, C] -> [N, C], one GEMM per factor."""
    shape = rows.shape
    for f in reversed(factors):
        f = f.T if transposed else f
        rows = rows.reshape(-1, len(f)) @ f if right == 1 else f.T @ rows.reshape(-1, len(f), right)
        right *= len(f)
    return rows.reshape(shape)


def _cuda_kernel(device):
    """fast_hadamard_transform's kernel for CUDA, where that package is installed; else None."""
    if device.type != "cuda":
        return None
    try:
        from fast_hadamard_transform import hadamard_transform
    except (ImportError, OSError):
        return None
    return hadamard_transform


def rotation(size, order="released"):
    """The Rotation for `size` channels: the same object for the same arguments, matrices built when first used.

    size   any integer >= 1; a warning says where H is the DCT-II, for want of a Hadamard matrix
    order  of the Kronecker factors: "released", H_m^T (x) H_2^p (the published code), or "paper", H_2^p (x) H_m

    ValueError on a size below 1 or an unknown order.
    """
    size = operator.index(size)
    if size < 1:
        raise ValueError(f"the size of a rotation must be at least 1, not {size}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    made = _rotation(size, order)
    if not made.is_hadamard:
        warnings.warn(f"no Hadamard matrix for size {size}: the rotation is the orthonormal DCT-II", stacklevel=2)
    return made


@lru_cache(maxsize=16)
def _rotation(size, order):
    plan = _plan(size)
    if not plan:
        return Rotation(size, order, (), 1, f"DCT-II (no Hadamard construction for {size})", is_hadamard=False)
    orders, power = plan
    words = [f"{_paley(n)[0]} {n}" if n != 40 else "Sylvester 2 x Paley I 20" for n in orders]
    sylvester = [f"Sylvester {power}"] if power > 1 or not orders else []
    construction = " x ".join(words + sylvester if order == "released" else sylvester + words)
    return Rotation(size, order, orders, power, construction, is_hadamard=True)
