//! Metrics of the current or last migration.

use vm_api::migration::{MigrationProgress, MigrationRole};

use super::Text;

impl Text {
    /// Adds the progress or the result of a migration.
    pub(super) fn migration(&mut self, progress: &MigrationProgress) {
        let role = if progress.role == MigrationRole::Sender { "sender" } else { "receiver" };
        let labels = [("role", role.to_string())];
        let parts = progress.downtime.unwrap_or_default();
        let micros = |time: u64| time as f64 / 1e6;
        let gauges = [
            ("active", "1 while a migration is in progress.", f64::from(u8::from(progress.state == "active"))),
            ("pass", "Passes over the memory that are complete.", progress.pass.into()),
            ("memory_bytes", "The guest's memory.", progress.memory_bytes as f64),
            ("remaining_bytes", "What is still to be sent.", progress.remaining_bytes as f64),
            ("dirty_bytes_per_second", "Pages that the guest writes to.", progress.dirty_bytes_per_s as f64),
            ("bandwidth_bytes_per_second", "What the connections carry.", progress.bandwidth_bytes_per_s as f64),
            ("throttle_percent", "The share of their time that vCPUs are held.", progress.throttle_percent.into()),
            ("elapsed_seconds", "How long it takes or took.", progress.elapsed_ms as f64 / 1e3),
            ("downtime_seconds", "How long the guest was paused; 0 before that.", micros(parts.total_us)),
        ];
        for (name, help, value) in gauges {
            let name = format!("cloud_hypervisor_migration_{name}");
            self.family(&name, "gauge", help);
            self.sample(&name, &labels, value);
        }
        let counters = [
            ("transferred_bytes", "Bytes that were sent or received.", progress.transferred_bytes),
            ("pages", "Pages that were sent or received with their bytes.", progress.pages),
            ("zero_pages", "Pages that are zero, of which no byte is sent.", progress.zero_pages),
        ];
        for (name, help, value) in counters {
            let name = format!("cloud_hypervisor_migration_{name}_total");
            self.family(&name, "counter", help);
            self.sample(&name, &labels, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_api::migration::DowntimeParts;

    use super::*;

    #[test]
    fn a_migration_has_metrics_by_its_side() {
        let mut text = Text::default();
        let downtime = Some(DowntimeParts { total_us: 12_500, ..DowntimeParts::default() });
        let (state, throttle_percent) = ("active".to_string(), 20);
        text.migration(&MigrationProgress { state, throttle_percent, pages: 7, downtime, ..Default::default() });
        for sample in [
            "cloud_hypervisor_migration_active{role=\"sender\"} 1\n",
            "cloud_hypervisor_migration_throttle_percent{role=\"sender\"} 20\n",
            "cloud_hypervisor_migration_downtime_seconds{role=\"sender\"} 0.0125\n",
            "cloud_hypervisor_migration_pages_total{role=\"sender\"} 7\n",
        ] {
            assert!(text.0.contains(sample), "{}", text.0);
        }
    }
}
