//! The memory that the program has allocated and freed again.

/// The most that the C library keeps at the end of each of its parts, and the size from which an allocation is a
/// mapping of its own, in bytes: the library's own limits, before it raises them.
#[cfg(target_env = "gnu")]
const MOST_KEPT: libc::c_int = 128 << 10;

/// The most parts for threads that the C library makes, for each CPU.
#[cfg(target_env = "gnu")]
const PARTS_PER_CPU: libc::c_int = 8;

/// Has the C library keep its limits. By itself it raises them to twice the largest allocation that was freed, such as
/// a request's body, and then keeps as much in each of the parts that it makes for threads: [`give_back`] does not
/// reach their ends.
pub(crate) fn limit() {
    // SAFETY: it takes no pointer, and may be called at any time.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, MOST_KEPT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MOST_KEPT);
        // The library's own number, which it would work out in whichever thread is the ninth, from a file that few may
        // open.
        if let Ok(cpus) = rustix::thread::sched_getaffinity(None) {
            libc::mallopt(libc::M_ARENA_MAX, PARTS_PER_CPU.saturating_mul(cpus.count().cast_signed()));
        }
    }
}

/// Returns it to the host. The C library keeps what was freed below something that is still in use, in each of the
/// parts that it makes for threads.
pub(crate) fn give_back() {
    // SAFETY: it takes no pointer, may be called by any thread at any time, and keeps what is in use.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has the C library look for what it looks for only once: whether the host promises more memory than it has
/// (`vm.overcommit_memory`), which decides how it gives memory back. A thread that may open no file could not look.
/// For a thread that is not the first.
pub(crate) fn look() {
    // Together they are more than is kept, and each is less than a mapping of its own.
    #[cfg(target_env = "gnu")]
    drop(std::hint::black_box([(); 4].map(|()| Vec::<u8>::with_capacity(100 << 10))));
}
