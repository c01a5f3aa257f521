//! Starting threads: one thread, `starter`, starts all others.
//!
//! A new thread inherits the system call filters of its parent, and can only add to them. So its parent must have a
//! filter that allows the calls of any thread. A vCPU whose guest causes workers to start asks the starter and waits;
//! its own filter allows neither the workers' calls nor clone. Likewise, new threads get the program's CPUs and control
//! group, not a vCPU's.
//!
//! There is one starter per process, as filters belong to the process. [`begin`] starts it, or the first use.

pub(crate) mod core_group;
mod kind;
mod spare;

use std::io;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use virtio_devices::{NewThread, Thread, WORKER_STACK, start_workers_with};

pub(crate) use kind::ThreadKind;
pub(crate) use spare::end_spares;

/// Stack of the starter, in bytes. Its calls are shallow.
const STACK: usize = 128 << 10;

/// Setup of each new thread, which exits if it fails.
pub(crate) type Prepare = Arc<dyn Fn(ThreadKind) -> io::Result<()> + Send + Sync>;

/// Request to the starter, with a channel for the result.
enum Order {
    /// Start a thread.
    Start { kind: ThreadKind, thread: NewThread, answer: SyncSender<io::Result<Thread>> },
    /// Start later vCPUs in a core scheduling group of their own, or in the process's.
    Group { own: bool, answer: SyncSender<Result<(), Errno>> },
}

static STARTER: OnceLock<Sender<Order>> = OnceLock::new();

/// Confines the calling thread, if threads must be confined.
static CONFINE: OnceLock<fn() -> io::Result<()>> = OnceLock::new();

/// Sets the function that the starter calls before it starts a thread: the new thread is confined as well.
pub(crate) fn confine_by(confine: fn() -> io::Result<()>) {
    let _ = CONFINE.set(confine);
}

/// Starts the starter, if it does not run yet. The starter and all its threads run `prepare` first.
///
/// # Errors
///
/// Fails if the starter cannot be started or prepared.
pub(crate) fn begin(prepare: Prepare) -> io::Result<()> {
    if STARTER.get().is_some() {
        return Ok(());
    }
    let (sender, orders) = mpsc::channel();
    let work = {
        let prepare = Arc::clone(&prepare);
        NewThread::new(ThreadKind::Starter.name(), STACK, move || serve(&orders, &prepare))
    };
    // The handle is dropped: the starter runs until the process ends.
    start_prepared(ThreadKind::Starter, work, &prepare, || Ok(()))?;
    // If another thread was faster, this starter's queue closes and it exits.
    let _ = STARTER.set(sender);
    start_workers_with(|kind, thread| start(ThreadKind::Worker(kind), thread));
    Ok(())
}

/// Starts a thread. Its `first` work runs with the starter's privileges.
///
/// # Errors
///
/// Fails if the host has no thread, memory or mapping left, or the thread's setup fails.
pub(crate) fn start(kind: ThreadKind, thread: NewThread) -> io::Result<Thread> {
    let thread = match spare::take(kind, thread) {
        Ok(thread) => return Ok(thread),
        Err(thread) => *thread,
    };
    start_new(kind, thread)
}

/// Returns the text for a thread that the host refused, for replies to clients.
pub(crate) fn no_thread(error: &io::Error) -> String {
    format!("the host cannot start a thread: {error}")
}

/// Starts threads of these kinds in advance, with workers' stacks, which wait for work of their kind or for
/// [`end_spares`]. Threads that the host refuses are started on demand.
pub(crate) fn keep_spares(kinds: impl IntoIterator<Item = ThreadKind>) {
    for kind in kinds.into_iter().take(spare::MOST) {
        let (thread, work) = spare::waiting(WORKER_STACK);
        match start_new(kind, thread) {
            Ok(thread) => spare::keep(kind, WORKER_STACK, work, thread),
            Err(error) => return log::debug!("no further thread is started in advance: {error}"),
        }
    }
}

fn start_new(kind: ThreadKind, thread: NewThread) -> io::Result<Thread> {
    let (answer, answered) = mpsc::sync_channel(1);
    order(Order::Start { kind, thread, answer })?;
    answered.recv().map_err(|_| ended())?
}

/// Starts later vCPUs in a new core scheduling group without other threads (`own`), or in the process's group.
///
/// # Errors
///
/// Fails if the kernel has no core scheduling, or cores have one thread. Groups are unchanged then.
pub(crate) fn group_vcpus(own: bool) -> Result<(), Errno> {
    let (answer, answered) = mpsc::sync_channel(1);
    // Without a starter, no vCPU can start either.
    order(Order::Group { own, answer }).map_err(|_| Errno::SRCH)?;
    answered.recv().unwrap_or(Err(Errno::SRCH))
}

fn order(order: Order) -> io::Result<()> {
    if STARTER.get().is_none() {
        begin(Arc::new(|_| Ok(())))?;
    }
    STARTER.get().ok_or_else(ended)?.send(order).map_err(|_| ended())
}

/// Runs the starter.
fn serve(orders: &Receiver<Order>, prepare: &Prepare) {
    // True if the starter is in the vCPUs' group, which its new threads inherit and other kinds leave.
    let mut grouped = false;
    for order in orders {
        match order {
            Order::Start { kind, thread, answer } => {
                // Confined here, so that a new thread inherits the VM's confinement to its files.
                let confined = CONFINE.get().map_or(Ok(()), |confine| confine());
                // The thread that needs it waits for the reply.
                let _ = answer.send(confined.and_then(|()| {
                    let leave = if grouped && kind != ThreadKind::Vcpu { core_group::leave } else { || Ok(()) };
                    start_prepared(kind, thread, prepare, leave)
                }));
            }
            Order::Group { own, answer } => {
                let done = match own {
                    true => core_group::create(),
                    false if grouped => core_group::leave(),
                    false => Ok(()),
                };
                grouped = if done.is_ok() { own } else { grouped };
                let _ = answer.send(done);
            }
        }
    }
}

/// Starts a thread from the calling one, and waits for its setup. The new thread first runs `leave`, to leave the
/// calling thread's core scheduling group.
fn start_prepared(
    kind: ThreadKind,
    thread: NewThread,
    prepare: &Prepare,
    leave: impl FnOnce() -> Result<(), Errno> + Send + 'static,
) -> io::Result<Thread> {
    let (report, prepared) = mpsc::sync_channel(1);
    let NewThread { name, stack, first, run } = thread;
    let prepare = Arc::clone(prepare);
    let run = move || {
        let left = leave().map_err(io::Error::from);
        first.into_iter().for_each(|first| first());
        let ready = left.and_then(|()| prepare(kind));
        let can_run = ready.is_ok();
        let _ = report.send(ready);
        drop((report, prepare));
        if can_run {
            run();
        }
    };
    let thread = NewThread::new(name, stack, run).start()?;
    match prepared.recv() {
        Ok(Ok(())) => Ok(thread),
        refused => {
            // The thread exits at once; a panic has been reported.
            let _ = thread.join();
            Err(refused.map_or_else(|_| ended(), |refused| refused.err().unwrap_or_else(ended)))
        }
    }
}

/// Error of a thread that should never end.
fn ended() -> io::Error {
    io::Error::other("the thread that starts others has ended; please report this")
}

#[cfg(test)]
mod tests {
    use virtio_devices::WorkerKind;

    use super::*;

    #[test]
    fn a_thread_is_started_by_the_starter_and_not_by_who_needs_it() {
        // The caller is bound to one CPU, the new thread to none.
        begin(Arc::new(|_| Ok(()))).unwrap();
        let (found, find) = mpsc::channel();
        let one = rustix::thread::CpuSet::new();
        let needs = std::thread::spawn(move || {
            let all = rustix::thread::sched_getaffinity(None).unwrap();
            let mut first = one;
            first.set((0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap());
            rustix::thread::sched_setaffinity(None, &first).unwrap();
            let look = move || found.send(rustix::thread::sched_getaffinity(None).unwrap()).unwrap();
            let thread = start(ThreadKind::Serial, NewThread::new("serial", STACK, look)).unwrap();
            assert_eq!(thread.join(), Ok(()));
            all
        });
        assert_eq!(needs.join().unwrap(), find.recv().unwrap());
    }

    #[test]
    fn spare_thread_runs_work_of_its_kind_under_its_new_name() {
        // No VM of another test uses this kind.
        let kind = ThreadKind::Worker(WorkerKind::TapFinder);
        keep_spares([kind]);
        let (found, find) = mpsc::channel();
        let work = |stack| {
            let found = found.clone();
            let look = move || {
                found.send(rustix::thread::name().unwrap().into_string().unwrap()).unwrap();
            };
            NewThread::new("its-name", stack, look)
        };
        let thread = start(kind, work(WORKER_STACK)).unwrap();
        assert_eq!(thread.name(), "its-name");
        assert_eq!(thread.join(), Ok(()));
        assert_eq!(find.recv().unwrap(), "its-name");
        assert_eq!(spare::count(kind), 0);
        // Refused: another kind, another stack, or setup with other privileges.
        keep_spares([kind]);
        for (kind, thread) in [
            (ThreadKind::Worker(WorkerKind::Queue), work(WORKER_STACK)),
            (kind, work(2 * WORKER_STACK)),
            (kind, work(WORKER_STACK).after(|| {})),
        ] {
            assert_eq!(start(kind, thread).unwrap().join(), Ok(()));
            assert_eq!(find.recv().unwrap(), "its-name");
        }
        assert_eq!(spare::count(kind), 1);
        end_spares();
        assert_eq!(spare::count(kind), 0);
    }

    #[test]
    fn a_thread_that_cannot_be_prepared_does_nothing() {
        let (ran, runs) = mpsc::channel();
        let refuse: Prepare = Arc::new(|kind| {
            if kind == ThreadKind::Worker(WorkerKind::Rng) { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
        });
        for (kind, expected) in [(ThreadKind::Worker(WorkerKind::Rng), false), (ThreadKind::Vcpu, true)] {
            let ran = ran.clone();
            let thread = NewThread::new("test", STACK, move || ran.send(()).unwrap());
            let started = start_prepared(kind, thread, &refuse, || Ok(()));
            assert_eq!(started.is_ok(), expected);
            started.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(runs.try_recv().is_ok(), expected);
        }
    }

    /// Without core scheduling or shared cores, the expected result is the host's own error.
    #[test]
    fn only_vcpus_are_in_their_core_scheduling_group() {
        use rustix::thread::{CoreSchedulingScope, core_scheduling_cookie, gettid};
        // A separate starter, because other tests change groups as well.
        let (orders, received) = mpsc::channel();
        let prepare: Prepare = Arc::new(|_| Ok(()));
        let starter = std::thread::spawn(move || serve(&received, &prepare));
        let cookie = |kind| {
            let (found, find) = mpsc::channel();
            let look = move || found.send(core_scheduling_cookie(gettid(), CoreSchedulingScope::Thread)).unwrap();
            let (answer, answered) = mpsc::sync_channel(1);
            orders.send(Order::Start { kind, thread: NewThread::new("test", STACK, look), answer }).unwrap();
            answered.recv().unwrap().unwrap().join().unwrap();
            find.recv().unwrap()
        };
        let group = |own| {
            let (answer, answered) = mpsc::sync_channel(1);
            orders.send(Order::Group { own, answer }).unwrap();
            answered.recv().unwrap()
        };
        let (vcpu, worker) = (ThreadKind::Vcpu, ThreadKind::Worker(WorkerKind::Rng));
        let outside = cookie(worker);
        assert_eq!(cookie(vcpu), outside);
        let grouped = group(true);
        let first = cookie(vcpu);
        assert_eq!(cookie(worker), outside);
        match grouped {
            Ok(()) => {
                assert_ne!(first, outside);
                assert_eq!(cookie(vcpu), first, "one group for all vCPUs");
                assert_eq!(group(true), Ok(()));
                assert_ne!(cookie(vcpu), first, "another group for the next VM");
            }
            Err(error) => {
                assert!([Errno::INVAL, Errno::NODEV].contains(&error), "{error}");
                assert_eq!(first, outside);
            }
        }
        assert_eq!(group(false), Ok(()));
        assert_eq!(cookie(vcpu), outside);
        drop(orders);
        starter.join().unwrap();
    }

    #[test]
    fn a_thread_that_cannot_leave_the_vcpus_group_does_nothing() {
        let (ran, runs) = mpsc::channel::<()>();
        let thread = NewThread::new("test", STACK, move || ran.send(()).unwrap());
        let prepare: Prepare = Arc::new(|_| Ok(()));
        let started = start_prepared(ThreadKind::Serial, thread, &prepare, || Err(Errno::NOMEM));
        assert_eq!(started.unwrap_err().raw_os_error(), Some(Errno::NOMEM.raw_os_error()));
        assert!(runs.recv().is_err());
    }

    #[test]
    fn a_thread_that_the_host_refuses_is_an_error() {
        let refused = start(ThreadKind::Serial, NewThread::new("test", 1 << 48, || {}));
        assert!(refused.is_err());
        let thread = start(ThreadKind::Serial, NewThread::new("test", STACK, || {})).unwrap();
        assert_eq!(thread.join(), Ok(()), "the starter is still there");
    }
}
