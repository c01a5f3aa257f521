//! A peer without IOTLB messages whose function is behind an IOMMU.
//!
//! The peer has mapped all of the guest's memory, and takes the addresses in its rings for guest physical ones. So its
//! queues run only while that is true: while the function is in bypass. The driver that attaches the function to a
//! domain of its own gets its answer when the queues have stopped. If they do not stop, the request is refused, and
//! they run on as before.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use log::error;
use parking_lot::{Condvar, Mutex};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::RunnerError;
use crate::memory::{DmaFollower, DmaMapping, DmaReach, NotFollowed, Translate};
use crate::os::eventfd::borrow;

/// The time that a driver waits for queues that do not stop: as long as a peer has for an answer, and a little for two
/// queues.
const PATIENCE: Duration = Duration::from_secs(10);

/// The peer's link to the IOMMU, until this is dropped.
pub(super) struct Confined {
    iommu: Arc<dyn Translate>,
    bounds: Arc<Bounds>,
}

/// The state that decides if the peer's queues may run.
struct Bounds {
    /// [`PATIENCE`].
    patience: Duration,
    state: Mutex<State>,
    stopped: Condvar,
    /// Signalled when `allowed` of [`State`] has changed.
    changed: EventFd,
}

#[derive(Default)]
struct State {
    /// Addresses are guest physical ones.
    allowed: bool,
    runs: bool,
    /// The queues did not stop in time, and must still stop.
    is_late: bool,
}

impl Confined {
    /// A peer whose queues do not run, of a function behind `iommu`.
    pub(super) fn new(iommu: &Arc<dyn Translate>) -> io::Result<Self> {
        Self::with_patience(iommu, PATIENCE)
    }

    fn with_patience(iommu: &Arc<dyn Translate>, patience: Duration) -> io::Result<Self> {
        let changed = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let bounds = Arc::new(Bounds { patience, state: Mutex::default(), stopped: Condvar::new(), changed });
        iommu.follow(Some(Arc::clone(&bounds) as Arc<dyn DmaFollower>)).map_err(io::Error::other)?;
        Ok(Self { iommu: Arc::clone(iommu), bounds })
    }

    /// Marks the queues as running, if they may run.
    ///
    /// # Errors
    ///
    /// Fails with the reason if they may not.
    pub(super) fn begin(&self) -> Result<(), RunnerError> {
        let _ = self.bounds.changed.read();
        let state = &mut *self.bounds.state.lock();
        state.runs = state.allowed;
        if state.allowed { Ok(()) } else { Err(confined()) }
    }

    /// Marks the queues as stopped.
    pub(super) fn end(&self) {
        let mut state = self.bounds.state.lock();
        (state.runs, state.is_late) = (false, false);
        self.bounds.stopped.notify_all();
    }

    /// True if the queues may run.
    pub(super) fn allows(&self) -> bool {
        self.bounds.state.lock().allowed
    }

    /// True if the queues have to stop.
    pub(super) fn is_to_stop(&self) -> bool {
        let _ = self.bounds.changed.read();
        let state = self.bounds.state.lock();
        state.runs && !state.allowed
    }

    /// The event that reports a change of [`Self::allows`].
    pub(super) fn watched(&self) -> BorrowedFd<'_> {
        borrow(&self.bounds.changed)
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        self.end();
        let _ = self.iommu.follow(None);
    }
}

impl std::fmt::Debug for Confined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Confined").field("allows", &self.allows()).finish_non_exhaustive()
    }
}

impl DmaFollower for Bounds {
    /// Does nothing: the peer accesses no mapping of a domain.
    fn mapped(&self, _mapping: DmaMapping) -> Result<(), NotFollowed> {
        Ok(())
    }

    fn unmapped(&self, _mappings: &[DmaMapping]) {}

    /// Queues that failed to stop in time may still access everything.
    fn has_forgotten(&self) -> bool {
        let state = self.state.lock();
        !(state.is_late && state.runs)
    }

    fn attached(&self, reach: DmaReach<'_>) -> Result<(), NotFollowed> {
        let mut state = self.state.lock();
        state.allowed = matches!(reach, DmaReach::Everything);
        state.is_late &= !state.allowed;
        let _ = self.changed.write(1);
        if state.runs && !state.allowed {
            // One wait is enough: a function that cannot be attached is detached again.
            if !state.is_late {
                self.stopped.wait_while_for(&mut state, |state| state.runs, self.patience);
                state.is_late = state.runs;
                if state.is_late {
                    error!("a vhost-user backend does not stop: it may reach memory outside its mappings");
                }
            }
            if state.runs {
                return Err(NotFollowed);
            }
        }
        Ok(())
    }
}

/// The error of queues that may not run.
pub(super) fn confined() -> RunnerError {
    let why = "its function is in a domain of the virtual IOMMU, and a vhost-user backend without IOTLB messages works \
               in bypass only: have the guest attach it so (iommu.passthrough=1, or identity as the type of its group)";
    RunnerError { what: "reach the guest's memory", source: io::Error::other(why) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::iommu::{Iommu, Request, Status};

    #[test]
    fn confining_a_running_peer_completes_once_its_queues_stop() {
        let iommu = Iommu::new(48);
        let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
        let translate: Arc<dyn Translate> = Arc::clone(attachment.endpoint()) as Arc<dyn Translate>;
        let peer = Confined::new(&translate).unwrap();
        peer.begin().unwrap();
        assert!(!peer.is_to_stop(), "bypass at boot");
        thread::scope(|scope| {
            let attach = scope.spawn(|| iommu.carry_out(Request::Attach { domain: 1, endpoint: 0x100, bypass: false }));
            crate::testing::driver_queue::eventually("a request to stop", || peer.is_to_stop());
            assert!(!attach.is_finished());
            peer.end();
            attach.join().unwrap().unwrap();
        });
        assert!(peer.begin().unwrap_err().to_string().contains("works in bypass only"));
        iommu.carry_out(Request::Attach { domain: 2, endpoint: 0x100, bypass: true }).unwrap();
        assert!(peer.allows());
        peer.begin().unwrap();
        drop(peer);
        iommu.carry_out(Request::Attach { domain: 1, endpoint: 0x100, bypass: false }).unwrap();
    }

    /// Ends the traffic, also of a test that fails.
    struct End<'a>(&'a AtomicBool);

    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }

    /// The queues of a peer that runs them whenever it may, under traffic, and a driver that puts its function into a
    /// domain and takes it out again.
    #[test]
    fn a_page_reused_once_a_peer_is_confined_is_not_written() {
        const ROUNDS: u64 = 10_000;
        const CANARY: u64 = 0xc5c5_c5c5;
        let iommu = Iommu::new(48);
        let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
        let translate: Arc<dyn Translate> = Arc::clone(attachment.endpoint()) as Arc<dyn Translate>;
        let peer = Confined::new(&translate).unwrap();
        let (page, stop, written) = (AtomicU64::new(0), AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    if peer.begin().is_ok() {
                        let write = || page.store(written.fetch_add(1, Ordering::Relaxed) & 0xffff, Ordering::Release);
                        while !peer.is_to_stop() && !stop.load(Ordering::Acquire) {
                            write();
                            thread::yield_now();
                        }
                        // The peer finishes the work that it has begun.
                        thread::yield_now();
                        write();
                        peer.end();
                    }
                    thread::yield_now();
                }
            });
            let _end = End(&stop);
            // On a busy machine, the peer's thread may come late.
            let until = Instant::now() + Duration::from_secs(30);
            let is_due = |round| round < ROUNDS || written.load(Ordering::Relaxed) == 0 && Instant::now() < until;
            for round in (0..).take_while(|round| is_due(*round)) {
                let confine = Request::Attach { domain: 1, endpoint: 0x100, bypass: false };
                iommu.carry_out(confine).unwrap();
                page.store(CANARY, Ordering::Release);
                thread::yield_now();
                assert_eq!(page.load(Ordering::Acquire), CANARY, "{round}");
                iommu.carry_out(Request::Detach { domain: 1, endpoint: 0x100 }).unwrap();
                if round % 2 == 0 {
                    thread::yield_now();
                }
            }
        });
        let written = written.load(Ordering::Relaxed);
        println!("{ROUNDS} rounds, {written} writes");
        assert!(written > 0);
    }

    #[test]
    fn a_detach_that_a_peer_has_not_followed_is_no_success() {
        let iommu = Iommu::new(48);
        let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
        let translate: Arc<dyn Translate> = Arc::clone(attachment.endpoint()) as Arc<dyn Translate>;
        let peer = Confined::with_patience(&translate, Duration::from_millis(100)).unwrap();
        iommu.set_bypass(false);
        iommu.carry_out(Request::Attach { domain: 1, endpoint: 0x100, bypass: true }).unwrap();
        peer.begin().unwrap();
        let detach = Request::Detach { domain: 1, endpoint: 0x100 };
        assert_eq!(iommu.carry_out(detach), Err(Status::DeviceError));
        assert!(!peer.allows() && peer.is_to_stop());
        peer.end();
        iommu.carry_out(Request::Attach { domain: 1, endpoint: 0x100, bypass: true }).unwrap();
        iommu.carry_out(detach).unwrap();
    }

    #[test]
    fn a_peer_that_does_not_stop_is_not_confined_and_keeps_running() {
        let iommu = Iommu::new(48);
        let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
        let translate: Arc<dyn Translate> = Arc::clone(attachment.endpoint()) as Arc<dyn Translate>;
        let peer = Confined::with_patience(&translate, Duration::from_millis(100)).unwrap();
        peer.begin().unwrap();
        let attach = || iommu.carry_out(Request::Attach { domain: 1, endpoint: 0x100, bypass: false });
        for _ in 0..2 {
            let begun = Instant::now();
            attach().unwrap_err();
            assert!(begun.elapsed() >= Duration::from_millis(100), "each time, it may stop");
            assert!(attachment.endpoint().is_bypassed(), "it is in no domain, as before");
            assert!(peer.allows() && !peer.is_to_stop());
        }
        // Removing memory cannot be refused: the queues must still stop, and no thread learns that they may run.
        iommu.set_bypass(false);
        attach().unwrap_err();
        assert!(!peer.allows() && peer.is_to_stop());
        peer.end();
        attach().unwrap();
        assert!(peer.begin().is_err());
    }
}
