"""Which rows matter: one interface, one file for each published method. `kvstrata.methods.registry` lists them."""

from __future__ import annotations
