//! The memory that the program has allocated and freed again.

/// Returns it to the host. The C library keeps what was freed below something that is still in use, in each of the
/// parts that it makes for threads.
pub(crate) fn give_back() {
    // SAFETY: it takes no pointer, may be called by any thread at any time, and keeps what is in use.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
