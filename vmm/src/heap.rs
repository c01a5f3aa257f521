//! Memory that the program has allocated and freed.

/// The most that the C library keeps at the end of each of its arenas, and the size from which an allocation is a
/// mapping of its own, in bytes: the library's initial limits.
#[cfg(target_env = "gnu")]
const MOST_KEPT: libc::c_int = 128 << 10;

/// The most arenas that the C library creates for threads, for each CPU.
#[cfg(target_env = "gnu")]
const PARTS_PER_CPU: libc::c_int = 8;

/// Fixes the C library's limits. Otherwise it raises them to twice the largest freed allocation, such as a request's
/// body, and then keeps that much in each thread arena: [`give_back`] does not trim the ends of these.
pub(crate) fn limit() {
    // SAFETY: the call takes no pointer, and is allowed at any time.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, MOST_KEPT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MOST_KEPT);
        // The library's default, which the thread with the ninth arena would otherwise compute, from a file that few
        // threads may open.
        if let Ok(cpus) = rustix::thread::sched_getaffinity(None) {
            libc::mallopt(libc::M_ARENA_MAX, PARTS_PER_CPU.saturating_mul(cpus.count().cast_signed()));
        }
    }
}

/// Returns freed memory to the host. Freed memory below an allocation in use is otherwise kept, in each arena.
pub(crate) fn give_back() {
    // SAFETY: the call takes no pointer, is allowed in any thread at any time, and keeps memory in use.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Makes the C library read `vm.overcommit_memory` now, which it does once, and which decides how it returns memory: a
/// thread that may not open files could not read it. Must be called from a thread other than the first.
pub(crate) fn look() {
    // Together these exceed the limit for trimming, but each is too small for a mapping of its own.
    #[cfg(target_env = "gnu")]
    drop(std::hint::black_box([(); 4].map(|()| Vec::<u8>::with_capacity(100 << 10))));
}
