//! Counters of a device's workers, and the logging of its losses.

use std::sync::Arc;

/// Description of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CounterText {
    /// Name in `vm.counters` and metrics: lower case, words joined by `_`.
    pub name: &'static str,
    /// Unit of the count, as a plural.
    pub unit: &'static str,
    /// True for a counter of losses and refusals.
    pub is_loss: bool,
    /// Sentence that explains the count to an operator.
    pub text: &'static str,
}

/// Defines the counters of one kind of device: an enum of the counted events, the device's counts, and a worker's own.
/// The doc comment of a counter is its text in documents, metrics and `ch-remote counters`.
///
/// A device's counts start when it is plugged in. A worker adds its own to them after each batch, so that workers do
/// not share a cache line for each buffer.
macro_rules! counters {
    (
        $(#[$enum_doc:meta])* pub enum $counter:ident;
        $(#[$counts_doc:meta])* pub struct $counters:ident;
        $($(#[doc = $doc:literal])+ $name:ident: $unit:ident = $text:literal,)+
    ) => {
        $(#[$enum_doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $counter {
            $($(#[doc = $doc])+ $name,)+
        }

        impl $counter {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];
            /// Number of counters.
            pub const COUNT: usize = Self::ALL.len();
            /// Descriptions, in the same order.
            pub const TEXTS: &'static [$crate::CounterText] = &[
                $($crate::CounterText {
                    name: $text,
                    unit: stringify!($unit),
                    is_loss: Self::$name.is_loss(),
                    text: concat!($($doc),+).trim_ascii(),
                },)+
            ];

            /// Name in metrics: lower case, words joined by `_`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }

        $(#[$counts_doc])*
        #[derive(Debug)]
        pub struct $counters([std::sync::atomic::AtomicU64; $counter::COUNT]);

        impl $counters {
            pub(crate) fn new() -> Self {
                Self([const { std::sync::atomic::AtomicU64::new(0) }; $counter::COUNT])
            }

            /// The present value of one counter. Workers add to it after each batch.
            pub fn get(&self, counter: $counter) -> u64 {
                self.0[counter as usize].load(std::sync::atomic::Ordering::Relaxed)
            }

            /// All counters by name, with their present values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                $counter::ALL.iter().map(|counter| (counter.name(), self.get(*counter)))
            }

            /// Losses and refusals: names, and counts.
            pub(crate) fn losses(&self) -> Vec<(&'static str, u64)> {
                let losses = $counter::ALL.iter().filter(|counter| counter.is_loss());
                losses.map(|counter| (counter.name(), self.get(*counter))).filter(|(_, count)| *count != 0).collect()
            }
        }

        impl crate::device::counters::Counts for $counters {
            fn new() -> Self {
                Self::new()
            }

            fn losses(&self) -> Vec<(&'static str, u64)> {
                self.losses()
            }
        }

        /// A worker's own counts since it last added them to the device's.
        #[derive(Debug)]
        pub(crate) struct Tally([u64; $counter::COUNT]);

        impl Tally {
            pub(crate) fn new() -> Self {
                Self([0; $counter::COUNT])
            }

            pub(crate) fn count(&mut self, counter: $counter) {
                self.add(counter, 1);
            }

            pub(crate) fn add(&mut self, counter: $counter, amount: u64) {
                let value = &mut self.0[counter as usize];
                *value = value.wrapping_add(amount);
            }

            pub(crate) fn flush(&mut self, counters: &$counters) {
                for (own, shared) in self.0.iter_mut().zip(&counters.0) {
                    if *own != 0 {
                        shared.fetch_add(std::mem::take(own), std::sync::atomic::Ordering::Relaxed);
                    }
                }
            }
        }
    };
}

pub(crate) use counters;

/// As [`counters!`], for a device with a single queue that a [`queue_worker`](crate::device::queue_worker) runs;
/// includes that worker's counters.
macro_rules! queue_counters {
    (
        $(#[$enum_doc:meta])* pub enum $counter:ident;
        $(#[$counts_doc:meta])* pub struct $counters:ident;
        $($(#[doc = $doc:literal])+ $name:ident: $unit:ident = $text:literal,)+
    ) => {
        crate::device::counters::counters! {
            $(#[$enum_doc])*
            pub enum $counter;
            $(#[$counts_doc])*
            pub struct $counters;

            $($(#[doc = $doc])+ $name: $unit = $text,)+
            /// Wake-ups of a worker by a doorbell of the driver.
            Kicks: doorbells = "kicks",
            /// Times that the device signalled the driver, also without a vector, masked, or lost on demand.
            Interrupts: interrupts = "interrupts",
            /// Queues stopped because their rings are invalid: a fault of the driver, which has to reset the device.
            BrokenRings: queues = "broken_rings",
        }

        crate::device::counters::queue_tally!($counter, $counters);
    };
}

pub(crate) use queue_counters;

/// Makes a device's [`counters!`] those of a [`queue_worker`](crate::device::queue_worker).
macro_rules! queue_tally {
    ($counter:ident, $counters:ident) => {
        impl crate::device::counters::QueueTally for Tally {
            type Counters = $counters;

            fn new() -> Self {
                Self::new()
            }

            fn count_kick(&mut self) {
                self.count($counter::Kicks);
            }

            fn count_interrupt(&mut self) {
                self.count($counter::Interrupts);
            }

            fn count_broken_ring(&mut self) {
                self.count($counter::BrokenRings);
            }

            fn flush(&mut self, counters: &$counters) {
                self.flush(counters);
            }
        }
    };
}

pub(crate) use queue_tally;

/// The counters of any kind of device that a [`queue_worker`](crate::device::queue_worker) updates.
pub(crate) trait QueueTally: Send + 'static {
    /// The device's counts.
    type Counters: Send + Sync + 'static;

    /// Starts with all counts at 0.
    fn new() -> Self;

    /// Counts a wake-up by a doorbell.
    fn count_kick(&mut self);

    /// Counts an interrupt.
    fn count_interrupt(&mut self);

    /// Counts a queue stopped for an invalid ring.
    fn count_broken_ring(&mut self);

    /// Adds the counts to the device's.
    fn flush(&mut self, counters: &Self::Counters);
}

/// The counters of a kind of device.
pub(crate) trait Counts: Send + Sync + 'static {
    /// All counters at 0.
    fn new() -> Self;

    /// Losses and refusals: names, and counts.
    fn losses(&self) -> Vec<(&'static str, u64)>;
}

/// Number of a device's losses that have been reported.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    told: u64,
}

impl Losses {
    /// Describes the losses since the device was plugged in, in one line, if there are at least twice as many as were
    /// reported: a guest that keeps losing buffers and resetting its device is reported less and less often.
    pub(crate) fn doubled(&mut self, losses: &[(&'static str, u64)]) -> Option<String> {
        self.tell(losses, self.told.saturating_mul(2).max(1))
    }

    /// The same, if there are more than were reported.
    pub(crate) fn untold(&mut self, losses: &[(&'static str, u64)]) -> Option<String> {
        self.tell(losses, self.told.saturating_add(1))
    }

    fn tell(&mut self, losses: &[(&'static str, u64)], least: u64) -> Option<String> {
        let total = losses.iter().fold(0, |total: u64, (_, count)| total.saturating_add(*count));
        if total < least {
            return None;
        }
        self.told = total;
        Some(losses.iter().map(|(name, count)| format!("{name}={count}")).collect::<Vec<_>>().join(" "))
    }
}

/// A device's id and counters. Logs its losses when its driver has reset it and they have doubled, and at its end.
pub(crate) struct Counted<C: Counts> {
    id: String,
    counters: Arc<C>,
    losses: Losses,
}

impl<C: Counts> Counted<C> {
    /// Counters, at 0, of the device `id`.
    pub(crate) fn new(id: &str) -> Self {
        Self::with(id, Arc::new(C::new()))
    }

    /// The same with `counters`.
    pub(crate) fn with(id: &str, counters: Arc<C>) -> Self {
        Self { id: id.to_string(), counters, losses: Losses::default() }
    }

    /// Id of the device.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The counters.
    pub(crate) fn counters(&self) -> &Arc<C> {
        &self.counters
    }

    /// Logs the losses at a reset if they have doubled. Counts that exiting workers have not added yet are logged
    /// another time.
    pub(crate) fn was_reset(&mut self) {
        let losses = self.losses.doubled(&self.counters.losses());
        self.log(losses);
    }

    fn log(&self, losses: Option<String>) {
        if let Some(losses) = losses {
            log::info!("{}: lost or refused so far: {losses}", self.id);
        }
    }
}

impl<C: Counts> Drop for Counted<C> {
    fn drop(&mut self) {
        let losses = self.losses.untold(&self.counters.losses());
        self.log(losses);
    }
}
