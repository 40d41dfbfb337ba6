"""Lost links: what is known of them, the search for one, and which nodes train together. Pure."""

from orchestrator.core.network import links, reach, search, timing
