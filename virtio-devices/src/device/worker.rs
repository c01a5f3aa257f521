//! Worker threads: their kinds and names, and their start.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Worker;
use crate::os::thread::{NewThread, Thread};

/// The maximum length of a thread's name on Linux.
const THREAD_NAME: usize = 15;
/// A worker's stack in bytes. Workers do not recurse or keep frames on it.
pub const WORKER_STACK: usize = 128 * 1024;

/// Time that a worker waits for its predecessor before it checks whether to end itself.
const PATIENCE: Duration = Duration::from_millis(10);

/// Locks an object that a worker owns while it runs; waits until its predecessor has ended. `None` once the worker must
/// stop, because a successor may have locked it first, and a vCPU that waits for this worker must not wait for the
/// successor.
pub(crate) fn own<'o, T>(owned: &'o Mutex<T>, stop: &AtomicBool) -> Option<MutexGuard<'o, T>> {
    while !stop.load(Ordering::Acquire) {
        if let Some(guard) = owned.try_lock_for(PATIENCE) {
            return Some(guard);
        }
    }
    None
}

/// The work of a device's thread, which determines its system call filter. Devices whose threads make the same calls
/// share a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WorkerKind {
    /// Moves the frames of a NIC between its queues and a tap.
    Net,
    /// Opens a new tap after one was deleted under such a worker.
    TapFinder,
    /// Starts, stops and monitors vhost-net, which runs a NIC's queues, and serves the control queue.
    VhostNet,
    /// The same for a vDPA device.
    Vdpa,
    /// Holds the queues of a NIC whose backend is missing, and serves its control queue.
    Absent,
    /// Moves frames between the ports of a switch, and between them and its uplink.
    Switch,
    /// Executes the requests of a disk's queue.
    Block,
    /// Transfers a virtio console's bytes.
    Console,
    /// Fills buffers with entropy.
    Rng,
    /// Returns pages of the guest's memory to the host.
    Balloon,
    /// Plugs and unplugs a memory device's blocks.
    Mem,
    /// Handles requests of a queue, and writes pages of a mapped file to its medium.
    Flush,
    /// Runs the socket device and its connections.
    Vsock,
    /// Handles requests of a queue, with no calls but those of every worker.
    Queue,
    /// Starts, stops and monitors a vhost-user backend of a device, and serves a NIC's control queue.
    VhostUser,
    /// Forwards a write to such a device's configuration to its backend, and ends.
    VhostUserConfig,
}

impl WorkerKind {
    /// All kinds.
    pub const ALL: [Self; 16] = [
        Self::Net,
        Self::TapFinder,
        Self::VhostNet,
        Self::Vdpa,
        Self::Absent,
        Self::Switch,
        Self::Block,
        Self::Console,
        Self::Rng,
        Self::Balloon,
        Self::Mem,
        Self::Flush,
        Self::Vsock,
        Self::Queue,
        Self::VhostUser,
        Self::VhostUserConfig,
    ];
}

/// Starts a worker.
pub type StartWorker = fn(WorkerKind, NewThread) -> io::Result<Thread>;

/// Function that starts workers, once the VMM has set it. There is one for the process, as with system call filters.
static STARTER: OnceLock<StartWorker> = OnceLock::new();

/// Makes `start` start all workers of this process from now on. Without it, the thread that needs a worker starts it,
/// which then inherits that thread's system call filters. Only the first call has an effect.
pub fn start_workers_with(start: StartWorker) {
    let _ = STARTER.set(start);
}

/// Starts a thread with a worker's stack size.
pub(crate) fn spawn(kind: WorkerKind, name: String, run: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
    start(kind, worker(name, run))
}

/// The same, for a thread that executes `first` before it drops the privileges that its kind does not need, and before
/// this returns.
pub(crate) fn spawn_after(
    first: impl FnOnce() + Send + 'static,
    kind: WorkerKind,
    name: String,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<Thread> {
    start(kind, worker(name, run).after(first))
}

fn worker(name: String, run: impl FnOnce() + Send + 'static) -> NewThread {
    let run = || {
        run_where_the_process_does();
        run();
    };
    NewThread::new(name, WORKER_STACK, run)
}

fn start(kind: WorkerKind, thread: NewThread) -> io::Result<Thread> {
    match STARTER.get() {
        Some(start) => start(kind, thread),
        None => thread.start(),
    }
}

/// Lets the calling thread run on the CPUs of the process's first thread. The thread that started it may be bound to
/// others: a vCPU's own, or those that the process had at its start.
fn run_where_the_process_does() {
    if let (Ok(own), Ok(process)) = (sched_getaffinity(None), sched_getaffinity(Some(getpid())))
        && own != process
    {
        // If this is refused, the worker runs on the vCPU's CPU.
        let _ = sched_setaffinity(None, &process);
    }
}

/// A set of host CPUs. Ignores numbers from 1,024 on.
pub(crate) fn cpu_set(cpus: &[u32]) -> CpuSet {
    let mut set = CpuSet::new();
    let known = cpus.iter().filter_map(|cpu| usize::try_from(*cpu).ok()).filter(|cpu| *cpu < CpuSet::MAX_CPU);
    known.for_each(|cpu| set.set(cpu));
    set
}

/// True if the host has one of these CPUs, and the process may use it.
pub(crate) fn can_run_on(cpus: &CpuSet) -> bool {
    // Only an attempt shows this, so a short-lived thread makes one.
    let (cpus, can) = (*cpus, Arc::new(AtomicBool::new(false)));
    let found = Arc::clone(&can);
    let run = move || found.store(sched_setaffinity(None, &cpus).is_ok(), Ordering::Release);
    let tried = spawn(WorkerKind::Block, "try-cpus".to_string(), run);
    tried.is_ok_and(|thread| thread.join().is_ok()) && can.load(Ordering::Acquire)
}

/// Binds the calling thread to these CPUs.
pub(crate) fn run_on(cpus: &CpuSet) {
    // It was possible when the device was opened. If those CPUs have gone offline since, the worker runs on any.
    let _ = sched_setaffinity(None, cpus);
}

/// Spawns a worker for each of `parts`, or none. If one cannot be spawned, the others end before they have touched
/// anything, and are joined here. Workers lock `complete` first, and end at once if it is false.
pub(crate) fn spawn_all<T>(
    parts: Vec<T>,
    complete: &Mutex<bool>,
    spawn: impl Fn(T) -> io::Result<Worker>,
) -> io::Result<Vec<Worker>> {
    let mut workers = Vec::with_capacity(parts.len());
    let mut locked = complete.lock();
    let result = parts.into_iter().try_for_each(|part| {
        workers.push(spawn(part)?);
        Ok(())
    });
    *locked = result.is_ok();
    drop(locked);
    if let Err(error) = result {
        for worker in workers {
            // A worker that panicked has ended, too.
            let _ = worker.thread.join();
        }
        return Err(error);
    }
    Ok(workers)
}

/// `<id>_<kind><N>`. An id that is too long keeps its end, which distinguishes VFs.
pub(crate) fn thread_name(id: &str, kind: &str, number: u16) -> String {
    let name = format!("{}_{kind}{number}", id.replace('\0', ""));
    let excess = name.len().saturating_sub(THREAD_NAME);
    name.char_indices().find(|(start, _)| *start >= excess).map_or(String::new(), |(start, _)| name[start..].to_owned())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn stopped_worker_does_not_wait_for_a_faster_successor() {
        let (queue, stop) = (Mutex::new(()), AtomicBool::new(false));
        thread::scope(|scope| {
            let successor = queue.lock();
            let worker = scope.spawn(|| own(&queue, &stop).is_some());
            thread::sleep(2 * PATIENCE);
            assert!(!worker.is_finished());
            stop.store(true, Ordering::Release);
            assert!(!worker.join().unwrap(), "it ends while the other one owns the queue");
            drop(successor);
            assert!(own(&queue, &stop).is_none());
            assert!(own(&queue, &AtomicBool::new(false)).is_some());
        });
    }

    #[test]
    fn a_worker_is_not_bound_to_the_cpu_of_the_vcpu_that_starts_it() {
        let process = sched_getaffinity(Some(getpid())).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).find(|cpu| process.is_set(*cpu)).unwrap();
        let of_worker = thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set(cpu);
            sched_setaffinity(None, &one).unwrap();
            let (found, find) = std::sync::mpsc::channel();
            let look = move || found.send(sched_getaffinity(None).unwrap()).unwrap();
            spawn(WorkerKind::Rng, "test".to_string(), look).unwrap().join().unwrap();
            assert_eq!(sched_getaffinity(None), Ok(one));
            find.recv().unwrap()
        });
        assert_eq!(of_worker.join().unwrap(), process);
    }

    #[test]
    fn a_thread_name_ends_in_its_pair_and_has_15_bytes_at_most() {
        assert_eq!(thread_name("_net0", "qp", 0), "_net0_qp0");
        assert_eq!(thread_name("eleven-byte", "qp", 0), "eleven-byte_qp0");
        assert_eq!(thread_name("production-pf0v1", "qp", 0), "ction-pf0v1_qp0");
        assert_eq!(thread_name("production-pf0v10", "qp", 12), "ion-pf0v10_qp12");
        assert_eq!(thread_name("ÄÖÜÄÖÜÄÖÜ", "qp", 0), "ÖÜÄÖÜ_qp0");
        assert_eq!(thread_name("a\0b", "q", 0), "ab_q0");
    }
}
