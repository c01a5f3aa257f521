//! Counters of a device's workers, and how its losses are logged.

/// Makes the counters of one kind of device: an enum of what is counted, the device's counts, and a worker's own.
///
/// A device's counts are since it was plugged in. A worker adds its own to them after each batch: workers do not share
/// a cache line with each buffer.
macro_rules! counters {
    (
        $(#[$enum_doc:meta])* pub enum $counter:ident;
        $(#[$counts_doc:meta])* pub struct $counters:ident;
        $($(#[$doc:meta])* $name:ident = $text:literal,)*
    ) => {
        $(#[$enum_doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $counter {
            $($(#[$doc])* $name,)*
        }

        impl $counter {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];
            /// How many there are.
            pub const COUNT: usize = Self::ALL.len();

            /// Its name in metrics: lower case, words joined by `_`.
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

            /// What was lost or refused: names, and how often.
            pub(crate) fn losses(&self) -> Vec<(&'static str, u64)> {
                let losses = $counter::ALL.iter().filter(|counter| counter.is_loss());
                losses.map(|counter| (counter.name(), self.get(*counter))).filter(|(_, count)| *count != 0).collect()
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

/// How many of a device's losses have been reported.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    told: u64,
}

impl Losses {
    /// What was lost since the device was plugged in, in one line, if that is at least twice what has been reported: a
    /// guest that keeps losing buffers and resetting its device is reported less and less often.
    pub(crate) fn doubled(&mut self, losses: &[(&'static str, u64)]) -> Option<String> {
        self.tell(losses, self.told.saturating_mul(2).max(1))
    }

    /// The same, if that is more than has been reported.
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

/// Logs what [`Losses`] has to report about the device `id`.
pub(crate) fn log_losses(id: &str, losses: Option<String>) {
    if let Some(losses) = losses {
        log::info!("{id}: lost or refused so far: {losses}");
    }
}
