//! A measure of work for tests: descriptors read, addresses looked up and bytes copied by the current thread, and the
//! most of it within one span. Outside tests, nothing is counted.

#[cfg(test)]
pub(crate) use counted::{Span, bytes, descriptor, translation};
#[cfg(not(test))]
pub(crate) use uncounted::{Span, bytes, descriptor, translation};

#[cfg(not(test))]
mod uncounted {
    /// A span of work.
    pub(crate) struct Span;

    impl Span {
        /// Begins a span.
        #[inline]
        pub(crate) const fn new() -> Self {
            Self
        }
    }

    /// Counts a descriptor.
    #[inline]
    pub(crate) const fn descriptor() {}

    /// Counts a look-up in an IOMMU's mappings.
    #[inline]
    pub(crate) const fn translation() {}

    /// Counts copied bytes.
    #[inline]
    pub(crate) const fn bytes(_: usize) {}
}

#[cfg(test)]
pub(crate) mod counted {
    use std::cell::Cell;

    thread_local! {
        static DONE: Cell<Effort> = const { Cell::new(Effort { descriptors: 0, translations: 0, bytes: 0 }) };
        static LONGEST: Cell<u64> = const { Cell::new(0) };
    }

    /// An amount of work.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct Effort {
        /// Descriptors that were read.
        pub descriptors: u64,
        /// Look-ups in an IOMMU's mappings.
        pub translations: u64,
        /// Bytes that were copied.
        pub bytes: u64,
    }

    impl Effort {
        /// The work of this thread so far.
        pub(crate) fn so_far() -> Self {
            DONE.get()
        }

        /// The work since `earlier`.
        pub(crate) fn since(self, earlier: Self) -> Self {
            Self {
                descriptors: self.descriptors - earlier.descriptors,
                translations: self.translations - earlier.translations,
                bytes: self.bytes - earlier.bytes,
            }
        }

        /// The time of this work on a machine with cold caches, in ns: 25 for each descriptor, 75 for each look-up, and
        /// one for two bytes.
        pub(crate) fn nanos(self) -> u64 {
            25 * self.descriptors + 75 * self.translations + self.bytes / 2
        }
    }

    /// A span of work, such as the time that a lock is held.
    pub(crate) struct Span(Effort);

    impl Span {
        /// Begins a span.
        pub(crate) fn new() -> Self {
            Self(DONE.get())
        }
    }

    impl Drop for Span {
        fn drop(&mut self) {
            LONGEST.set(LONGEST.get().max(DONE.get().since(self.0).nanos()));
        }
    }

    /// Returns the longest span of this thread since the last call, in ns.
    pub(crate) fn take_longest() -> u64 {
        LONGEST.take()
    }

    /// Counts a descriptor.
    pub(crate) fn descriptor() {
        let done = DONE.get();
        DONE.set(Effort { descriptors: done.descriptors + 1, ..done });
    }

    /// Counts a look-up in an IOMMU's mappings.
    pub(crate) fn translation() {
        let done = DONE.get();
        DONE.set(Effort { translations: done.translations + 1, ..done });
    }

    /// Counts copied bytes.
    pub(crate) fn bytes(count: usize) {
        let done = DONE.get();
        DONE.set(Effort { bytes: done.bytes + count as u64, ..done });
    }
}
