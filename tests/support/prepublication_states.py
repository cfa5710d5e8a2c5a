"""States of a step that is to be decided, of any kind."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from kvstrata.cost.prepublication import Phase, PrepublicationState

__all__ = ["STATES"]

BOOLS = st.booleans()
MS = st.floats(0, 1e6) | st.just(math.inf)

STATES = st.builds(
    PrepublicationState,
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(Phase),
    BOOLS,
    MS,
    MS,
    st.floats(-1e6, 1e6) | st.just(math.inf),
    BOOLS,
    MS,
    BOOLS,
    BOOLS,
)
