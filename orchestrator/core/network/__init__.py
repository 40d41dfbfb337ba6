"""Lost links: their state, the search for one, and which nodes train together. Pure."""

from orchestrator.core.network import links, reach, search, timing
