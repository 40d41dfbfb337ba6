"""The commands of ``ucp``; ``ucp_core.cli`` puts them together.

``inspect`` and ``verify`` are in ``ucp_core.cli``; ``convert`` and ``plan`` in ``convert``;
``diff``, ``export`` and ``extract`` in ``tools``; options, progress and output in ``console``.
"""
