"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) on the first part of each head.

A pair of dimensions is turned by an angle that grows with the token's position, so that the
product of a query and a key depends on how far apart they stand. Positions count a row's real
tokens only: padding gets no number.
"""
import torch


def positions(slots):
    """slots (B, T), -1 at pads -> (B, T): a real token's slot is its position; a pad's is 0 and means nothing."""
    return slots.clamp(min=0)


def angles(position, rotary_dim: int, theta: float):
    """position (B, T) -> cos, sin, each (B, 1, T, rotary_dim) in fp32; theta is the base of the wavelengths."""
    pair = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=position.device)
    turn = position[..., None].float() / theta ** (pair / rotary_dim)     # (B, T, rotary_dim / 2)
    turn = torch.cat([turn, turn], -1)[:, None]                           # (B, 1, T, rotary_dim)
    return turn.cos(), turn.sin()


def rotate(x, cos, sin):
    """x (B, H, T, head_dim): turn the first rotary_dim dimensions, pass the others through."""
    dim = cos.shape[-1]
    turned, kept = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, -1)                                   # pair i is (i, i + rotary_dim / 2)
    turned = turned * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)
    return torch.cat([turned, kept], -1)                                  # (B, H, T, head_dim)
