//! Worker threads: their names, and how a device starts them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::Worker;

/// The length that Linux gives a thread's name.
const THREAD_NAME: usize = 15;
/// A worker's stack in bytes. Nothing in it recurses or keeps frames there.
const STACK: usize = 128 * 1024;

/// How long a worker waits for its predecessor before it checks whether to end itself.
const PATIENCE: Duration = Duration::from_millis(10);

/// Locks what a worker owns while it runs, which waits until its predecessor has ended. `None` once the worker is told
/// to stop, because a successor may have locked it first, and a vCPU that waits for this worker must not wait for that
/// one.
pub(crate) fn own<'o, T>(owned: &'o Mutex<T>, stop: &AtomicBool) -> Option<MutexGuard<'o, T>> {
    while !stop.load(Ordering::Acquire) {
        if let Some(guard) = owned.try_lock_for(PATIENCE) {
            return Some(guard);
        }
    }
    None
}

/// Starts a thread of a worker's size.
pub(crate) fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name).stack_size(STACK).spawn(run)
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
    use super::*;

    #[test]
    fn a_worker_that_is_told_to_stop_does_not_wait_for_a_successor_that_was_faster() {
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
    fn a_thread_name_ends_in_its_pair_and_has_15_bytes_at_most() {
        assert_eq!(thread_name("_net0", "qp", 0), "_net0_qp0");
        assert_eq!(thread_name("eleven-byte", "qp", 0), "eleven-byte_qp0");
        assert_eq!(thread_name("production-pf0v1", "qp", 0), "ction-pf0v1_qp0");
        assert_eq!(thread_name("production-pf0v10", "qp", 12), "ion-pf0v10_qp12");
        assert_eq!(thread_name("ÄÖÜÄÖÜÄÖÜ", "qp", 0), "ÖÜÄÖÜ_qp0");
        assert_eq!(thread_name("a\0b", "q", 0), "ab_q0");
    }
}
