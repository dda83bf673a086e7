"""Who proposes for which goal."""

from __future__ import annotations

from collections.abc import Mapping

from sac_search.study.advisor import Advisor
from sac_search.study.front_advisor import FrontAdvisor
from sac_search.study.goal import GoalKind
from sac_search.study.least_memory import LeastMemoryAdvisor

ADVISORS: Mapping[GoalKind, type[Advisor]] = {
    GoalKind.SPEED: Advisor,
    GoalKind.MEMORY: LeastMemoryAdvisor,
    GoalKind.PARETO: FrontAdvisor,
}
