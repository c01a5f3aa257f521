//! Live migration: requests of clients, and their replies.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::value::Value;
use crate::config::{OnMissingBackend, RestoredBackend, RestoredNet, ZoneUpdate};

/// Target of a migration, and options: `vm.send-migration`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("send-migration")]
#[schema(name = "SendMigrationData")]
pub struct SendMigration {
    /// Address of the target: tcp:<host>:<port> or unix:<path>.
    #[option("destination_url=<url>", required)]
    pub destination_url: String,
    /// Migrate to a VMM on the same host: memory, taps and the listening sockets of vsock and consoles are passed, and
    /// no page is copied. The target has an API socket of its own. Only with unix, and shared memory.
    #[option("local=on|off")]
    pub local: bool,
    /// Maximum downtime of the guest, in milliseconds.
    #[option("downtime_ms=<milliseconds>", default = 300)]
    pub downtime_ms: u32,
    /// Time for copying memory before timeout_strategy applies, in seconds.
    #[option("timeout_s=<seconds>", default = 3600)]
    pub timeout_s: u32,
    /// Action after timeout_s. cancel: the migration ends; ignore: the guest is stopped while the rest is sent.
    #[option("timeout_strategy=cancel|ignore", default = TimeoutStrategy::Cancel)]
    pub timeout_strategy: TimeoutStrategy,
    /// Number of connections that carry pages, at most 128. Several only with tcp.
    #[option("connections=<number>", default = 1)]
    #[schema(minimum = 1, maximum = 128)]
    pub connections: u32,
    /// Folder with ca-cert.pem, client-cert.pem and client-key.pem. Only with tcp.
    #[option("tls_dir=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    /// Copy memory before the guest moves (precopy) or after (postcopy, which is not supported).
    #[option("memory_mode=precopy|postcopy", default = MemoryMode::Precopy)]
    pub memory_mode: MemoryMode,
    /// Action for a NIC, PF or VF whose backend does not report its writes to the guest's memory: vDPA, and vhost-user
    /// without a dirty log. refuse: a running guest is not sent. link-down: its link is down and its backend is stopped
    /// while the VM is sent; a bond in the guest uses another NIC.
    #[option("on_unlogged_backend=refuse|link-down", default = OnMissingBackend::Refuse)]
    pub on_unlogged_backend: OnMissingBackend,
}

/// Address on which a VM is received, and differences on this host: `vm.receive-migration`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("receive-migration")]
#[schema(name = "ReceiveMigrationData")]
pub struct ReceiveMigration {
    /// Address to listen on: tcp:<host>:<port> or unix:<path>.
    #[option("receiver_url=<url>", required)]
    pub receiver_url: String,
    /// Folder with ca-cert.pem, server-cert.pem and server-key.pem. Only with tcp.
    #[option("tls_dir=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    /// Copy memory before the guest moves (precopy) or after (postcopy, which is not supported).
    #[option("memory_mode=precopy|postcopy", default = MemoryMode::Precopy)]
    pub memory_mode: MemoryMode,
    /// Time that the target waits for a source, in seconds.
    #[option("timeout_s=<seconds>", default = 3600)]
    pub timeout_s: u32,
    /// Reply as soon as the target listens, instead of when the guest has arrived or failed to.
    #[option("detach=on|off")]
    pub detach: bool,
    /// Descriptors of open taps, for each NIC that used descriptors: its id, or its id, a slash and the index of a VF.
    #[option("net_fds=[<id>@[<fd>,...],...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(about = "Taps of NICs and VFs that used descriptors.")]
    pub net_fds: Vec<RestoredNet>,
    /// Backends that replace those of the source, each for the NIC with this id, or a VF of it: tap=<interface>,
    /// fd=[<fd>,...], socket=<path>, vdpa=<path> or link=down.
    #[option("backends=[<id>[/<VF>]@<key>=<value>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(about = "Backends that replace those of the source.")]
    pub backends: Vec<RestoredBackend>,
    /// Memory zones whose memory comes from other NUMA nodes of this host than on the source.
    #[option("zone_updates=[<zone>@<node>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zone_updates: Vec<ZoneUpdate>,
    /// Action if the backend of a NIC, PF or VF cannot be opened. refuse: receive nothing. link-down: receive it with
    /// its link down; a backend can be given later (vm.set-vf).
    #[option("on_missing_backend=refuse|link-down", default = OnMissingBackend::Refuse)]
    pub on_missing_backend: OnMissingBackend,
}

/// The body of `vm.resume`, which is optional: options for resuming a paused VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, default)]
#[schema(name = "VmResume")]
pub struct ResumeOptions {
    /// Resume a guest whose migration ended as unknown. The caller asserts that the target is not running it.
    pub force: bool,
}

/// Action if a guest writes faster than its memory can be copied, until the time is up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum TimeoutStrategy {
    /// The migration ends, and the guest continues on the source.
    #[default]
    Cancel,
    /// The guest is stopped while the rest is sent.
    Ignore,
}

/// Time at which memory is copied: before or after the guest moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum MemoryMode {
    /// Before.
    #[default]
    Precopy,
    /// After, which is not supported.
    Postcopy,
}

fn word<T: Copy>(text: &str, words: [(&'static str, T); 2]) -> Result<T, String> {
    let known = words.iter().find(|(word, _)| word.eq_ignore_ascii_case(text));
    known.map(|(_, value)| *value).ok_or_else(|| format!("give {} or {}", words[0].0, words[1].0))
}

impl Value for TimeoutStrategy {
    fn parse(text: &str) -> Result<Self, String> {
        word(text, [("cancel", Self::Cancel), ("ignore", Self::Ignore)])
    }

    fn print(&self) -> Option<String> {
        Some(if *self == Self::Cancel { "cancel" } else { "ignore" }.to_string())
    }
}

impl Value for MemoryMode {
    fn parse(text: &str) -> Result<Self, String> {
        word(text, [("precopy", Self::Precopy), ("postcopy", Self::Postcopy)])
    }

    fn print(&self) -> Option<String> {
        Some(if *self == Self::Precopy { "precopy" } else { "postcopy" }.to_string())
    }
}

/// A VMM's side of a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "lowercase")]
pub enum MigrationRole {
    /// The VMM sends its VM.
    #[default]
    Sender,
    /// The VMM receives a VM.
    Receiver,
}

/// State of a migration. All except active are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Schema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// In progress.
    Active,
    /// The target has the guest.
    Finished,
    /// The source has the guest, after an error.
    Failed,
    /// The source has the guest, as a client requested.
    Cancelled,
    /// The guest powered off during the migration.
    GuestShutDown,
    /// It is unknown if the target has the guest, which is paused at the source.
    Unknown,
    /// As unknown, until a client resumed the guest at the source with force.
    Forced,
}

/// The reply to `vm.migration-progress`: the present migration, or the last.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct MigrationProgress {
    /// This VMM's side.
    pub role: MigrationRole,
    /// A [`MigrationState`].
    #[schema(of = MigrationState)]
    pub state: String,
    /// Current or last phase.
    pub phase: String,
    /// Number of complete passes over the memory.
    pub pass: u32,
    /// Size of the guest's memory, in bytes.
    pub memory_bytes: u64,
    /// Bytes sent or received.
    pub transferred_bytes: u64,
    /// Pages of 4 KiB sent or received with their contents.
    pub pages: u64,
    /// Zero pages, whose contents are not sent.
    pub zero_pages: u64,
    /// Bytes still to be sent.
    pub remaining_bytes: u64,
    /// Rate at which the guest dirties pages, in bytes per second.
    pub dirty_bytes_per_s: u64,
    /// Bandwidth of the connections, in bytes per second.
    pub bandwidth_bytes_per_s: u64,
    /// The share of time for which vCPUs are throttled.
    #[schema(format = "int64", maximum = 99)]
    pub throttle_percent: u8,
    /// Elapsed time, in milliseconds.
    pub elapsed_ms: u64,
    /// Downtime of the guest if it were stopped now, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimated_downtime_ms: Option<u64>,
    /// Downtime of the guest, once it was stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime: Option<DowntimeParts>,
    /// Reason for a failure, in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The parts of the guest's downtime, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct DowntimeParts {
    /// From the first vCPU's stop until the target's vCPUs run. The sum of the parts below, of which a receiver
    /// knows only the last.
    pub total_us: u64,
    /// vCPUs, devices and backends stop.
    pub stop_us: u64,
    /// The state is saved.
    pub save_us: u64,
    /// Sending the rest of the memory and the state.
    pub send_us: u64,
    /// The target loads them.
    pub load_us: u64,
    /// Handing over locks, and starting the guest on the target.
    pub handover_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_of_a_migration_are_those_of_cloud_hypervisor() {
        let config: SendMigration = "destination_url=tcp:h:1".parse().unwrap();
        assert_eq!(config, serde_json::from_str(r#"{"destination_url": "tcp:h:1"}"#).unwrap());
        assert_eq!((config.downtime_ms, config.timeout_s, config.connections), (300, 3600, 1));
        assert_eq!((config.timeout_strategy, config.memory_mode), (TimeoutStrategy::Cancel, MemoryMode::Precopy));
        assert!(!config.local && config.tls_dir.is_none());
        assert!("local=on".parse::<SendMigration>().is_err());
    }

    #[test]
    fn a_migration_written_as_text_or_json_reads_back() {
        let text = "destination_url=unix:/s,local=on,downtime_ms=5,timeout_s=9,timeout_strategy=ignore,connections=8,\
                    tls_dir=/t,memory_mode=postcopy,on_unlogged_backend=link-down";
        let config: SendMigration = text.parse().unwrap();
        assert_eq!(config.to_string(), text);
        let json = serde_json::to_value(&config).unwrap();
        assert_eq!((&json["timeout_strategy"], &json["memory_mode"]), (&"Ignore".into(), &"Postcopy".into()));
        assert_eq!(serde_json::from_value::<SendMigration>(json).unwrap(), config);
        assert!("destination_url=u,timeout_strategy=never".parse::<SendMigration>().is_err());
    }
}
