"""What happens to the jobs of an in-memory cluster from outside: the faults of a real one.

Each function does one thing to a `MemoryCluster`; nothing here is random.
"""

from __future__ import annotations

from slurm_rl.chain.scheduler import JobState, LinkRequest
from slurm_rl.launch.memory import MemoryCluster, MemoryJob
from slurm_rl.launch.memory_process import Process


def preempt(cluster: MemoryCluster, job: MemoryJob) -> None:
    """SIGTERM to the program, the grace, SIGKILL to everything, back to the queue.

    With `preempt_send_user_signal` the batch process is warned as before its time limit.
    """
    process = job.process
    if process is None:
        return
    if cluster.habits.user_signal:
        process.signal("told to stop")
    process.signal_program()

    def finish() -> None:
        cluster.kill_process(process)
        if job.process is process:
            cluster.back_to_queue(job)

    cluster.at(cluster.habits.grace_s, finish)


def reach_time_limit(cluster: MemoryCluster, job: MemoryJob, *, warning_s: float) -> None:
    """The job is warned now, and is at its time limit in `warning_s`."""
    process = job.process
    if process is None:
        return
    process.signal("time limit")

    def finish() -> None:
        cluster.kill_process(process)
        if job.process is process:
            cluster.end_job(job, "TIMEOUT")

    cluster.at(warning_s, finish)


def kill_program(process: Process) -> None:
    """SIGKILL to the program alone, as the kernel does where memory runs out."""
    if process.program is not None:
        process.program.alive = False


def kill_supervisor(cluster: MemoryCluster, job: MemoryJob, *, requeue: bool = False) -> None:
    """SIGKILL to the batch process alone; its program goes on, and nobody listens."""
    process = job.process
    if process is None:
        return
    process.alive = False
    if requeue:
        cluster.back_to_queue(job)
    else:
        cluster.end_job(job, "FAILED", 137)


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


def requeue_ended(cluster: MemoryCluster, job: MemoryJob) -> None:
    """Somebody types `scontrol requeue` on a job that is over: it runs again, under its id."""
    if job.state is JobState.ENDED and job in cluster.jobs:
        job.exit_code = None
        cluster.back_to_queue(job)


def restore_as_pending(cluster: MemoryCluster, job: MemoryJob) -> None:
    """A controller's old state: a running job is pending again and will run twice."""
    if job.process is not None:
        split_brain(cluster, job)
        job.begin = cluster.now
        cluster.look_again()


def submit_stranger(cluster: MemoryCluster, *, runs_s: float, name: str = "stranger") -> str:
    """Somebody else's job takes the next id and keeps it for `runs_s`."""
    job_id, cluster.next_id = str(cluster.next_id), cluster.next_id + 1
    request = LinkRequest(name=name, command=())
    job = MemoryJob(job_id, request, None, cluster.now, cluster.now, ())
    cluster.jobs.append(job)
    job.state, job.raw, job.started = JobState.RUNNING, "RUNNING", cluster.now
    cluster.at(runs_s, lambda: cluster.end_job(job, "COMPLETED", 0))
    return job_id


def silence(cluster: MemoryCluster, seconds: float) -> None:
    """The controller answers nothing for a while."""
    cluster.silent_until = cluster.now + seconds
