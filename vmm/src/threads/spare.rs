//! Threads that were started in time, and wait for work.
//!
//! To start a worker takes half a millisecond, most of it for the filter of its system calls. When a guest comes from
//! another host it stands still while its workers start, so theirs wait for it.

use std::ffi::CString;
use std::sync::mpsc::{SendError, SyncSender, sync_channel};

use parking_lot::Mutex;
use virtio_devices::{NewThread, Thread};

use super::kind::ThreadKind;

/// The most that are started in advance at once.
pub(super) const MOST: usize = 64;

/// Thread that waits for work.
struct Spare {
    kind: ThreadKind,
    stack: usize,
    /// Channel for its work.
    work: SyncSender<NewThread>,
    thread: Thread,
}

/// Threads that wait. They belong to the process, as the starter does.
static SPARES: Mutex<Vec<Spare>> = Mutex::new(Vec::new());

/// A thread that waits for work, and where that is sent. It ends when there will be none.
pub(super) fn waiting(stack: usize) -> (NewThread, SyncSender<NewThread>) {
    let (sender, work) = sync_channel::<NewThread>(1);
    let run = move || {
        let Ok(NewThread { name, run, .. }) = work.recv() else { return };
        // If it has no such name, it has none.
        if let Ok(name) = CString::new(name) {
            let _ = rustix::thread::set_name(&name);
        }
        run();
    };
    (NewThread::new("spare", stack, run), sender)
}

/// Keeps one that waits.
pub(super) fn keep(kind: ThreadKind, stack: usize, work: SyncSender<NewThread>, thread: Thread) {
    SPARES.lock().push(Spare { kind, stack, work, thread });
}

/// Has one that waits do the work of `thread`.
///
/// # Errors
///
/// None fits, and `thread` has to be started: none of its kind waits with such a stack, or it needs other rights first.
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

/// Ends those that wait.
pub(crate) fn end_spares() {
    SPARES.lock().clear();
}

/// Number of waiting threads of a kind.
#[cfg(test)]
pub(super) fn count(kind: ThreadKind) -> usize {
    SPARES.lock().iter().filter(|spare| spare.kind == kind).count()
}
