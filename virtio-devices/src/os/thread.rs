//! Threads whose creation can fail.
//!
//! `std::thread` is not used for threads that a guest can cause to start. It maps a signal stack in each new thread,
//! and panics there, which ends the program, if the process has no mapping left (`vm.max_map_count`). POSIX's
//! `pthread_create` returns either an error or a complete thread. The cost is std's message at a stack overflow: such a
//! thread still hits the guard page below its stack, and the program ends by SIGSEGV.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_void};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::process::Pid;

/// A thread that has not been started yet.
pub struct NewThread {
    /// Name. Linux keeps the first 15 bytes.
    pub name: String,
    /// The size of its stack in bytes, at least 16 KiB.
    pub stack: usize,
    /// Work before the thread drops the privileges inherited from its parent thread.
    pub first: Option<Box<dyn FnOnce() + Send>>,
    /// Work of the thread.
    pub run: Box<dyn FnOnce() + Send>,
}

/// A started thread. Dropping this detaches it.
///
/// Or the end of work without a thread of its own ([`Self::of_end`]).
pub struct Thread {
    /// `None` once joined, or if there is no thread.
    id: Option<libc::pthread_t>,
    /// Function that ends work without a thread.
    end: Option<Box<dyn FnOnce() + Send + Sync>>,
    name: String,
    ended: Arc<Ended>,
}

impl fmt::Debug for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, end: _, name, ended } = self;
        f.debug_struct("Thread").field("id", id).field("name", name).field("ended", ended).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Ended {
    finished: AtomicBool,
    panicked: AtomicBool,
    /// The thread's ID, from its start until its work is done.
    tid: Mutex<Option<Pid>>,
}

thread_local! {
    /// Objects that this thread drops after its work is done.
    static LEFT: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// Makes the calling thread drop `value` after its work is done. [`Thread::leave`] does not wait for the drop.
pub(crate) fn drop_after_work(value: Box<dyn Any>) {
    LEFT.with_borrow_mut(|left| left.push(value));
}

/// The thread panicked, which has been reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panicked;

/// The argument of a new thread.
struct Start {
    name: CString,
    first: Option<Box<dyn FnOnce() + Send>>,
    run: Box<dyn FnOnce() + Send>,
    ended: Arc<Ended>,
}

impl NewThread {
    /// Creates a thread of this name that executes `run`.
    pub fn new(name: impl Into<String>, stack: usize, run: impl FnOnce() + Send + 'static) -> Self {
        Self { name: name.into(), stack, first: None, run: Box::new(run) }
    }

    /// Makes the thread execute `first` before it drops the privileges inherited from its parent thread.
    #[must_use]
    pub fn after(self, first: impl FnOnce() + Send + 'static) -> Self {
        Self { first: Some(Box::new(first)), ..self }
    }

    /// Starts the thread, which initially inherits the system call filters, CPUs and signal mask of the calling thread.
    ///
    /// # Errors
    ///
    /// The host has no thread, no memory or no mapping left.
    pub fn start(self) -> io::Result<Thread> {
        let ended = Arc::new(Ended::default());
        let name = CString::new(self.name.replace('\0', ""))?;
        let start = Box::new(Start { name, first: self.first, run: self.run, ended: Arc::clone(&ended) });
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: the call initialises the attributes, and there is room for them.
        errno(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
        // SAFETY: the attributes were initialised above.
        let sized = errno(unsafe { libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), self.stack) });
        let created = sized.and_then(|()| {
            let argument = Box::into_raw(start);
            let mut id = MaybeUninit::uninit();
            // SAFETY: the attributes are initialised, `run` takes an argument of this type, and the thread owns the
            // argument if it starts.
            let error =
                unsafe { libc::pthread_create(id.as_mut_ptr(), attributes.as_ptr(), run, argument.cast::<c_void>()) };
            if let Err(error) = errno(error) {
                // SAFETY: no thread was started, so the argument is still that of `into_raw` above.
                drop(unsafe { Box::from_raw(argument) });
                return Err(error);
            }
            // SAFETY: the call succeeded, so it has written the ID.
            Ok(unsafe { id.assume_init() })
        });
        // SAFETY: the attributes were initialised above, and are not used after this.
        unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
        Ok(Thread { id: Some(created?), end: None, name: self.name, ended })
    }
}

impl Thread {
    /// The end of work by threads that continue, such as a switch's when a port is closed. `end` is called when this is
    /// joined or dropped, and waits only for data in flight.
    pub(crate) fn of_end(name: impl Into<String>, end: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { id: None, end: Some(Box::new(end)), name: name.into(), ended: Arc::default() }
    }

    /// The thread's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Renames this handle.
    #[must_use]
    pub fn renamed(mut self, name: String) -> Self {
        self.name = name;
        self
    }

    /// True once the work is done.
    pub fn is_finished(&self) -> bool {
        self.ended.finished.load(Ordering::Acquire)
    }

    /// True if this is the end of other threads' work, which waits for next to nothing.
    pub fn is_end(&self) -> bool {
        self.end.is_some()
    }

    /// Waits until the thread has ended.
    ///
    /// # Errors
    ///
    /// The thread panicked.
    pub fn join(mut self) -> Result<(), Panicked> {
        self.end_work();
        if let Some(id) = self.id.take() {
            // SAFETY: the ID is that of a thread that was neither joined nor detached.
            unsafe { libc::pthread_join(id, ptr::null_mut()) };
        }
        if self.ended.panicked.load(Ordering::Acquire) { Err(Panicked) } else { Ok(()) }
    }

    /// As [`Self::join`], for a thread whose work is done ([`Self::is_finished`]): does not wait for drops after the
    /// work.
    ///
    /// # Errors
    ///
    /// The thread panicked.
    pub fn leave(self) -> Result<(), Panicked> {
        if self.end.is_some() || !self.is_finished() {
            return self.join();
        }
        if self.ended.panicked.load(Ordering::Acquire) { Err(Panicked) } else { Ok(()) }
    }

    fn end_work(&mut self) {
        if let Some(end) = self.end.take() {
            end();
            self.ended.finished.store(true, Ordering::Release);
        }
    }

    /// Sends the thread a signal, which has no effect before it has begun and after its work is done.
    pub fn signal(&self, signal: libc::c_int) {
        // Not pthread_kill: musl's uses a call that might name a thread of another process. While this is locked, the
        // thread cannot end, and no other has its ID.
        if let Some(tid) = *self.ended.tid.lock() {
            // SAFETY: the call takes only numbers, of this process and a thread of it.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid.as_raw_nonzero().get(), signal) };
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.end_work();
        if let Some(id) = self.id.take() {
            // SAFETY: the ID is that of a thread that was neither joined nor detached.
            unsafe { libc::pthread_detach(id) };
        }
    }
}

/// The first function of a new thread.
extern "C" fn run(argument: *mut c_void) -> *mut c_void {
    // SAFETY: the argument is the `Start` from `NewThread::start`, which this thread now owns.
    let start = unsafe { Box::from_raw(argument.cast::<Start>()) };
    // SAFETY: the name ends in a zero byte, and the kernel copies at most 15 bytes before that.
    unsafe { libc::prctl(libc::PR_SET_NAME, start.name.as_ptr()) };
    let (first, run, ended) = (start.first, start.run, start.ended);
    *ended.tid.lock() = Some(rustix::thread::gettid());
    // Its hook has reported the panic, which must not unwind out of this function.
    if catch_unwind(AssertUnwindSafe(|| {
        first.into_iter().for_each(|first| first());
        run();
    }))
    .is_err()
    {
        ended.panicked.store(true, Ordering::Release);
    }
    *ended.tid.lock() = None;
    ended.finished.store(true, Ordering::Release);
    drop(LEFT.take());
    ptr::null_mut()
}

/// The result of a function that returns an error number.
fn errno(error: libc::c_int) -> io::Result<()> {
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const STACK: usize = 64 << 10;

    #[test]
    fn a_thread_runs_under_its_name_and_is_joined() {
        let (name, found) = mpsc::channel();
        let look = move || name.send(rustix::thread::name().unwrap()).unwrap();
        let thread = NewThread::new("a-name-of-20-bytes-x", STACK, look).start().unwrap();
        assert_eq!(thread.name(), "a-name-of-20-bytes-x");
        assert_eq!(found.recv().unwrap().to_str(), Ok("a-name-of-20-by"));
        assert_eq!(thread.join(), Ok(()));
    }

    #[test]
    fn leaving_a_thread_waits_for_its_work_but_not_for_its_drops() {
        struct Slow(mpsc::Receiver<()>, mpsc::Sender<()>);
        impl Drop for Slow {
            fn drop(&mut self) {
                self.0.recv().unwrap();
                self.1.send(()).unwrap();
            }
        }
        let ((go, gone), (done, dropped)) = (mpsc::channel(), mpsc::channel());
        let slow = Slow(gone, done);
        let thread = NewThread::new("test", STACK, move || drop_after_work(Box::new(slow))).start().unwrap();
        while !thread.is_finished() {
            std::thread::yield_now();
        }
        assert_eq!(thread.leave(), Ok(()));
        assert!(dropped.try_recv().is_err());
        go.send(()).unwrap();
        dropped.recv().unwrap();
        // A thread that is working, or that panicked.
        let thread = NewThread::new("test", STACK, || panic!("as the test wants")).start().unwrap();
        assert_eq!(thread.leave(), Err(Panicked));
    }

    #[test]
    fn a_signal_reaches_a_thread_that_works_and_none_that_has_ended() {
        let (begun, begin) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        let work = move || {
            // SAFETY: all zeroes is an empty set, and both sets are local variables.
            let signals = unsafe {
                let mut signals: libc::sigset_t = std::mem::zeroed();
                libc::sigaddset(&raw mut signals, libc::SIGRTMIN());
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, ptr::null_mut());
                signals
            };
            begun.send(()).unwrap();
            let mut signal = 0;
            // SAFETY: both are local variables.
            assert_eq!(unsafe { libc::sigwait(&raw const signals, &raw mut signal) }, 0);
            assert_eq!(signal, libc::SIGRTMIN());
            gone.recv().unwrap_err();
        };
        let thread = NewThread::new("test", STACK, work).start().unwrap();
        begin.recv().unwrap();
        // Its default action would end the program if it reached another thread.
        thread.signal(libc::SIGRTMIN());
        drop(go);
        while !thread.is_finished() {
            std::thread::yield_now();
        }
        thread.signal(libc::SIGKILL);
        assert_eq!(thread.join(), Ok(()));
    }

    #[test]
    fn a_panic_is_an_error_of_the_join() {
        let thread = NewThread::new("test", STACK, || panic!("as the test wants")).start().unwrap();
        while !thread.is_finished() {
            std::thread::yield_now();
        }
        assert_eq!(thread.join(), Err(Panicked));
    }

    #[test]
    fn a_thread_that_cannot_be_had_is_an_error_and_drops_its_work() {
        let work = Arc::new(());
        let kept = Arc::clone(&work);
        // No address space is that large.
        let refused = NewThread::new("test", 1 << 48, move || drop(kept)).start();
        assert!(refused.is_err());
        assert_eq!(Arc::strong_count(&work), 1);
    }

    #[test]
    fn work_without_a_thread_ends_once_when_it_is_joined_or_dropped() {
        let (ended, count) = mpsc::channel();
        let joined = Thread::of_end("test", {
            let ended = ended.clone();
            move || ended.send(1).unwrap()
        });
        assert!(!joined.is_finished());
        joined.signal(libc::SIGKILL);
        assert_eq!((joined.join(), count.try_iter().count()), (Ok(()), 1));
        drop(Thread::of_end("test", move || ended.send(2).unwrap()));
        assert_eq!(count.iter().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_thread_that_is_not_joined_runs_on() {
        let (done, wait) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        let run = move || {
            gone.recv().unwrap_err();
            done.send(()).unwrap();
        };
        drop(NewThread::new("test", STACK, run).start().unwrap());
        drop(go);
        wait.recv().unwrap();
    }
}
