"""Writes what deploy/kubernetes and deploy/helm have of deploy/prometheus/alerts.yaml.

python deploy/generate.py
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
HEAD = "# Made from deploy/prometheus/alerts.yaml by deploy/generate.py: do not edit.\n"
RULE = """apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvindexd
  labels: {app.kubernetes.io/name: kvindexd}
spec:
"""


def generated() -> dict[Path, str]:
    """Each file and its content."""
    alerts = (HERE / "prometheus" / "alerts.yaml").read_text()
    groups = alerts[alerts.index("groups:\n") :]
    inner = "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(True))
    return {
        HERE / "kubernetes/components/monitoring/prometheusrule.yaml": HEAD + RULE + inner,
        HERE / "helm/kvindexd/files/alerts.yaml": HEAD + groups,
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
