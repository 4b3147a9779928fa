"""The report of a run: plain data, strict JSON, and one offline page."""

from exhume.report.build import attack_result, build, failed_attack
from exhume.report.data import AttackResult, Report, read
from exhume.report.output import prepare, write

__all__ = ["AttackResult", "Report", "attack_result", "build", "failed_attack", "prepare", "read", "write"]
