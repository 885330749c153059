"""Labels that the controllers of jobs put on their pods: selectors of the pods may name them."""


def made_labels(kind: str, name: str, group: str) -> dict[str, str]:
    """Those by which all pods of a group of a job are known, and others are not."""
    match kind:
        case "MPIJob":
            return {
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/operator-name": "mpi-operator",
                "training.kubeflow.org/job-role": group,
            }
        case "Job":
            return {"batch.kubernetes.io/job-name": name, "job-name": name}
        case "JobSet":
            return {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": group,
            }
        case "LeaderWorkerSet":
            return {"leaderworkerset.sigs.k8s.io/name": name}
    return {}
