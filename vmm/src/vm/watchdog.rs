//! Reset of a guest that no longer pings its watchdog.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use virtio_devices::Expiry;

use crate::vcpu::cpu::{Stop, StopSignal};

/// Requests a reset through `stop` on each expiry. Logs the 1st, 2nd, 4th, 8th...
pub(super) fn expiry(stop: Arc<StopSignal>) -> Arc<Expiry> {
    let expiries = AtomicU64::new(0);
    Arc::new(move || {
        let count = expiries.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            log::warn!("the guest no longer pings its watchdog and is reset (number {count})");
        }
        stop.send(Stop::Reset);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_asks_for_a_reset() {
        let stop = Arc::new(StopSignal::new().unwrap());
        expiry(Arc::clone(&stop))();
        assert_eq!(stop.event().read().unwrap(), 1);
        assert!(matches!(stop.take(), Some(Stop::Reset)));
    }
}
