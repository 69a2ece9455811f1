"""What happens to the jobs of an in-memory cluster from outside: the faults of a real one.

Each function does one thing to a `MemoryCluster`; nothing here is random.
"""

from __future__ import annotations

from slurm_rl.chain.scheduler import JobState, LinkRequest
from slurm_rl.launch.memory import MemoryCluster, MemoryJob


def preempt(cluster: MemoryCluster, job: MemoryJob) -> None:
    """SIGTERM to the program, the grace, SIGKILL to everything, back to the queue."""
    process = job.process
    if process is None:
        return
    process.signal_program()

    def finish() -> None:
        cluster.kill_process(process)
        if job.process is process:
            cluster.back_to_queue(job)

    cluster.at(cluster.habits.grace_s, finish)


def kill(cluster: MemoryCluster, job: MemoryJob, *, requeue: bool = False) -> None:
    """Everything of the job is gone without a word; the job fails, or is back in the queue."""
    if job.process is None:
        return
    cluster.kill_process(job.process)
    if requeue:
        cluster.back_to_queue(job)
    else:
        cluster.end_job(job, "FAILED", 137)


def split_brain(cluster: MemoryCluster, job: MemoryJob, *, requeue: bool = True) -> None:
    """The controller gives up a node whose processes live on, with all that they can reach."""
    if job.process is None:
        return
    if requeue:
        cluster.back_to_queue(job)
    else:
        cluster.end_job(job, "NODE_FAIL")


def lose_node(cluster: MemoryCluster, node: str, *, live_on: bool, requeue: bool = True) -> None:
    """Every job of a node is given up; the node takes no more until `return_node`."""
    cluster.down_nodes.add(node)
    for job in [j for j in cluster.jobs if j.node == node and j.state is JobState.RUNNING]:
        if live_on:
            split_brain(cluster, job, requeue=requeue)
        else:
            kill(cluster, job, requeue=requeue)


def return_node(cluster: MemoryCluster, node: str) -> None:
    cluster.down_nodes.discard(node)
    cluster.look_again()


def hold(cluster: MemoryCluster, job: MemoryJob) -> None:
    """A pending job will not start by itself any more."""
    if job.state is JobState.PENDING:
        job.state = JobState.HELD


def release(cluster: MemoryCluster, job: MemoryJob) -> None:
    if job.state is JobState.HELD:
        job.state = JobState.PENDING
        cluster.look_again()


def crash_controller(cluster: MemoryCluster, *, within_s: float = 1.0, reissue: bool) -> int:
    """Kill the controller: jobs submitted in the last `within_s` are forgotten; returns how many.

    Their ids are given again if `reissue` says so; one that had started lives on as a zombie.
    """
    lost = [job for job in cluster.live_jobs() if cluster.now - job.submitted <= within_s]
    for job in lost:
        cluster.jobs.remove(job)
    if lost and reissue:
        cluster.next_id = min(int(job.base_id) for job in lost)
    cluster.look_again()
    return len(lost)


def restore_as_pending(cluster: MemoryCluster, job: MemoryJob) -> None:
    """A controller's old state: a running job is pending again and will run twice."""
    if job.process is not None:
        split_brain(cluster, job)
        job.begin = cluster.now
        cluster.look_again()


def submit_stranger(cluster: MemoryCluster, *, runs_s: float) -> str:
    """Somebody else's job takes the next id and keeps it for `runs_s`."""
    job_id = cluster.submit(LinkRequest(name="stranger", command=()))
    job = cluster.find(job_id)
    assert job is not None
    job.state, job.raw, job.started = JobState.RUNNING, "RUNNING", cluster.now
    cluster.at(runs_s, lambda: cluster.end_job(job, "COMPLETED", 0))
    return job_id


def silence(cluster: MemoryCluster, seconds: float) -> None:
    """The controller answers nothing for a while."""
    cluster.silent_until = cluster.now + seconds
