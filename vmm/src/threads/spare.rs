//! Threads started in advance, which wait for work.
//!
//! Starting a worker takes half a millisecond, mostly for its system call filter. A migrated guest is paused while its
//! workers start, so they are started before.

use std::ffi::CString;
use std::sync::mpsc::{SendError, SyncSender, sync_channel};

use parking_lot::Mutex;
use virtio_devices::{NewThread, Thread};

use super::kind::ThreadKind;

/// Limit on threads started in advance at once.
pub(super) const MOST: usize = 64;

/// A waiting thread.
struct Spare {
    kind: ThreadKind,
    stack: usize,
    /// Channel for its work.
    work: SyncSender<NewThread>,
    thread: Thread,
}

/// Waiting threads of the process.
static SPARES: Mutex<Vec<Spare>> = Mutex::new(Vec::new());

/// Returns a thread that waits for work, and the channel for it. The thread exits when the channel closes.
pub(super) fn waiting(stack: usize) -> (NewThread, SyncSender<NewThread>) {
    let (sender, work) = sync_channel::<NewThread>(1);
    let run = move || {
        let Ok(NewThread { name, run, .. }) = work.recv() else { return };
        // An invalid name is skipped.
        if let Ok(name) = CString::new(name) {
            let _ = rustix::thread::set_name(&name);
        }
        run();
    };
    (NewThread::new("spare", stack, run), sender)
}

/// Stores a waiting thread.
pub(super) fn keep(kind: ThreadKind, stack: usize, work: SyncSender<NewThread>, thread: Thread) {
    SPARES.lock().push(Spare { kind, stack, work, thread });
}

/// Gives the work of `thread` to a waiting thread.
///
/// # Errors
///
/// Fails with `thread` if none fits: no thread of this kind waits with such a stack, or its setup needs other
/// privileges.
pub(super) fn take(kind: ThreadKind, thread: NewThread) -> Result<Thread, Box<NewThread>> {
    let found = {
        let mut spares = SPARES.lock();
        let fits = |spare: &Spare| spare.kind == kind && spare.stack == thread.stack && thread.first.is_none();
        spares.iter().position(fits).map(|position| spares.swap_remove(position))
    };
    let Some(spare) = found else { return Err(Box::new(thread)) };
    let name = thread.name.clone();
    match spare.work.send(thread) {
        Ok(()) => Ok(spare.thread.renamed(name)),
        Err(SendError(thread)) => Err(Box::new(thread)),
    }
}

/// Ends all waiting threads.
pub(crate) fn end_spares() {
    SPARES.lock().clear();
}

/// Number of waiting threads of a kind.
#[cfg(test)]
pub(super) fn count(kind: ThreadKind) -> usize {
    SPARES.lock().iter().filter(|spare| spare.kind == kind).count()
}
