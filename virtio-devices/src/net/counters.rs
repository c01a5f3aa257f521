//! What a NIC did, and each reason for which it dropped a frame.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Something that is counted. Directions are the guest's: what it receives is `Rx`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Counter {
            $($(#[$doc])* $name,)*
        }

        impl Counter {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Its name in metrics: lower case, words joined by `_`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

counters! {
    /// Frames that the driver received.
    RxFrames = "rx_frames",
    /// Their bytes, without the virtio header.
    RxBytes = "rx_bytes",
    /// Frames that the backend took.
    TxFrames = "tx_frames",
    /// Their bytes, without the virtio header.
    TxBytes = "tx_bytes",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Control commands that were carried out.
    ControlCommands = "control_commands",
    /// Control commands that were refused or malformed.
    ControlRefused = "control_refused",
    /// Queues that were given up because their rings make no sense.
    BrokenRings = "broken_rings",
    /// Receive buffers that no frame can be written to.
    RxBadChains = "rx_bad_chains",
    /// Dropped: the driver's receive filter does not want it.
    RxFiltered = "rx_filtered",
    /// Dropped: longer than the buffers that the driver provides.
    RxTooLong = "rx_too_long",
    /// Dropped: no Ethernet frame.
    RxTooShort = "rx_too_short",
    /// Dropped: it arrived before the driver was ready.
    RxStale = "rx_stale",
    /// Dropped: it was waiting for buffers when the queue stopped.
    RxStopped = "rx_stopped",
    /// Dropped: the link is down.
    RxLinkDown = "rx_link_down",
    /// Dropped: the backend could not deliver it, or is gone.
    RxBackendErrors = "rx_backend_errors",
    /// Dropped: the chain's descriptors make no sense.
    TxBadChains = "tx_bad_chains",
    /// Dropped: the header asks for what was not negotiated, or contradicts the frame.
    TxBadHeaders = "tx_bad_headers",
    /// Dropped: longer than any frame may be.
    TxTooLong = "tx_too_long",
    /// Dropped: no Ethernet frame.
    TxTooShort = "tx_too_short",
    /// Dropped: the backend's buffer is full.
    TxBackendFull = "tx_backend_full",
    /// Dropped: the backend refuses the frame as invalid.
    TxBackendRefused = "tx_backend_refused",
    /// Dropped: the backend failed, or is down.
    TxBackendErrors = "tx_backend_errors",
    /// Dropped: the link is down.
    TxLinkDown = "tx_link_down",
}

impl Counter {
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// Whether it counts what is lost or refused though the driver wanted it.
    fn is_loss(self) -> bool {
        match self {
            Self::RxFrames | Self::RxBytes | Self::TxFrames | Self::TxBytes => false,
            Self::Kicks | Self::Interrupts | Self::ControlCommands => false,
            // Any network has frames for others, and does not wait for a driver.
            Self::RxFiltered | Self::RxStale => false,
            _ => true,
        }
    }
}

/// The counters of one NIC since it was plugged in.
#[derive(Debug)]
pub struct NetCounters([AtomicU64; Counter::COUNT]);

impl NetCounters {
    pub(super) fn new() -> Self {
        Self([const { AtomicU64::new(0) }; Counter::COUNT])
    }

    /// The present value of one counter. Workers add to it after each batch of frames.
    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }
}

/// What has been told of a NIC's losses.
#[derive(Debug, Default)]
pub(super) struct Losses {
    told: u64,
}

impl Losses {
    /// What was lost since the NIC was plugged in, in one line, if that is at least twice what has been told already: a guest
    /// that loses frames and resets its device again and again has it told less and less often.
    pub(super) fn doubled(&mut self, counters: &NetCounters) -> Option<String> {
        self.tell(counters, self.told.saturating_mul(2).max(1))
    }

    /// The same, if that is more than has been told already.
    pub(super) fn untold(&mut self, counters: &NetCounters) -> Option<String> {
        self.tell(counters, self.told.saturating_add(1))
    }

    fn tell(&mut self, counters: &NetCounters, least: u64) -> Option<String> {
        let losses = Counter::ALL.iter().filter(|counter| counter.is_loss());
        let losses = losses.map(|counter| (counter.name(), counters.get(*counter))).filter(|(_, count)| *count != 0);
        let total = losses.clone().fold(0, |total: u64, (_, count)| total.saturating_add(count));
        if total < least {
            return None;
        }
        self.told = total;
        Some(losses.map(|(name, count)| format!("{name}={count}")).collect::<Vec<_>>().join(" "))
    }
}

/// A worker's own counts since it last added them to the NIC's: workers do not share a cache line with each frame.
#[derive(Debug)]
pub(super) struct Tally([u64; Counter::COUNT]);

impl Tally {
    pub(super) fn new() -> Self {
        Self([0; Counter::COUNT])
    }

    pub(super) fn count(&mut self, counter: Counter) {
        self.add(counter, 1);
    }

    pub(super) fn add(&mut self, counter: Counter, amount: u64) {
        let value = &mut self.0[counter as usize];
        *value = value.wrapping_add(amount);
    }

    pub(super) fn flush(&mut self, counters: &NetCounters) {
        for (own, shared) in self.0.iter_mut().zip(&counters.0) {
            if *own != 0 {
                shared.fetch_add(std::mem::take(own), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_told_by_name_and_at_a_reset_only_when_they_have_doubled() {
        let (counters, mut losses) = (NetCounters::new(), Losses::default());
        let add = |counter, amount| {
            let mut tally = Tally::new();
            tally.add(counter, amount);
            tally.flush(&counters);
        };
        for harmless in [Counter::TxFrames, Counter::Kicks, Counter::RxFiltered, Counter::RxStale] {
            add(harmless, 7);
        }
        assert_eq!((losses.doubled(&counters), losses.untold(&counters)), (None, None));
        add(Counter::TxTooLong, 2);
        add(Counter::BrokenRings, 1);
        assert_eq!(losses.doubled(&counters).as_deref(), Some("broken_rings=1 tx_too_long=2"));
        assert_eq!((losses.doubled(&counters), losses.untold(&counters)), (None, None));
        add(Counter::TxTooLong, 2);
        assert_eq!(losses.doubled(&counters), None);
        add(Counter::TxTooLong, 1);
        assert_eq!(losses.doubled(&counters).as_deref(), Some("broken_rings=1 tx_too_long=5"));
        add(Counter::RxTooLong, 1);
        assert_eq!(losses.untold(&counters).as_deref(), Some("broken_rings=1 rx_too_long=1 tx_too_long=5"));
    }

    #[test]
    fn names_are_distinct_and_a_flush_moves_counts_once() {
        let names: std::collections::HashSet<_> = Counter::ALL.iter().map(|counter| counter.name()).collect();
        assert_eq!(names.len(), Counter::COUNT);
        let (counters, mut tally) = (NetCounters::new(), Tally::new());
        tally.add(Counter::TxBytes, 60);
        tally.count(Counter::TxFrames);
        tally.flush(&counters);
        tally.flush(&counters);
        assert_eq!((counters.get(Counter::TxBytes), counters.get(Counter::TxFrames)), (60, 1));
        assert_eq!(counters.get(Counter::RxFrames), 0);
    }
}
