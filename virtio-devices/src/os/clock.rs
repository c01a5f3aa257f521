//! The clock of rate limits and waits.

use std::time::Instant;

/// The time: the host's, unless a test has stopped its thread's clock.
pub(crate) fn now() -> Instant {
    #[cfg(any(test, feature = "testing"))]
    if let Some(now) = testing::stopped_at() {
        return now;
    }
    Instant::now()
}

#[cfg(any(test, feature = "testing"))]
pub(crate) mod testing {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    thread_local! {
        static STOPPED: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    pub(super) fn stopped_at() -> Option<Instant> {
        STOPPED.get()
    }

    /// While this exists, only the test advances the clock of this thread.
    pub(crate) struct StoppedClock(());

    impl StoppedClock {
        /// Stops the clock.
        pub(crate) fn new() -> Self {
            STOPPED.set(Some(Instant::now()));
            Self(())
        }

        /// Advances the clock.
        pub(crate) fn advance(&self, time: Duration) {
            STOPPED.set(STOPPED.get().map(|now| now + time));
        }
    }

    impl Drop for StoppedClock {
        fn drop(&mut self) {
            STOPPED.set(None);
        }
    }

    #[test]
    fn a_stopped_clock_moves_only_by_the_test_and_then_runs_again() {
        let clock = StoppedClock::new();
        let before = crate::os::clock::now();
        assert_eq!(crate::os::clock::now(), before);
        clock.advance(Duration::from_secs(5));
        assert_eq!(crate::os::clock::now() - before, Duration::from_secs(5));
        drop(clock);
        let after = crate::os::clock::now();
        assert!(after - before < Duration::from_secs(5) && crate::os::clock::now() >= after);
    }
}
