//! Live migration: what clients ask for, and what they are told.

use std::path::PathBuf;

use option_derive::Options;
use serde::{Deserialize, Serialize};

use crate::config::option::Value;
use crate::config::{OnMissingBackend, RestoredBackend, RestoredNet, ZoneUpdate};

/// Where a VM is sent, and how: `vm.send-migration`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options)]
#[options("send-migration")]
pub struct SendMigration {
    /// Where the target listens: tcp:<host>:<port> or unix:<path>.
    #[option("destination_url=<url>", required)]
    pub destination_url: String,
    /// Whether both VMMs are on one host: memory and taps are passed, and no page is copied.
    /// Only with unix, and shared memory.
    #[option("local=on|off")]
    pub local: bool,
    /// How long the guest may stand still, in milliseconds.
    #[option("downtime_ms=<milliseconds>", default = 300)]
    pub downtime_ms: u32,
    /// How long memory is copied before timeout_strategy decides, in seconds.
    #[option("timeout_s=<seconds>", default = 3600)]
    pub timeout_s: u32,
    /// What happens then. cancel: the migration ends; ignore: the guest is stopped for as long as the rest takes.
    #[option("timeout_strategy=cancel|ignore", default = TimeoutStrategy::Cancel)]
    pub timeout_strategy: TimeoutStrategy,
    /// How many connections carry pages, at most 128. Several only with tcp.
    #[option("connections=<number>", default = 1)]
    pub connections: u32,
    /// Folder with ca-cert.pem, client-cert.pem and client-key.pem. Only with tcp.
    #[option("tls_dir=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    /// Whether memory is copied before the guest moves (precopy) or after (postcopy, which is not supported).
    #[option("memory_mode=precopy|postcopy", default = MemoryMode::Precopy)]
    pub memory_mode: MemoryMode,
    /// What is done with a NIC, PF or VF whose backend cannot say what it writes to the guest's memory: vDPA, and
    /// vhost-user without a dirty log. refuse: a running guest is not sent. link-down: its link is down and its backend
    /// stands still while the VM is sent; a bond in the guest goes on by another.
    #[option("on_unlogged_backend=refuse|link-down", default = OnMissingBackend::Refuse)]
    pub on_unlogged_backend: OnMissingBackend,
}

/// Where a VM is received, and what differs on this host: `vm.receive-migration`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options)]
#[options("receive-migration")]
pub struct ReceiveMigration {
    /// Where the target listens: tcp:<host>:<port> or unix:<path>.
    #[option("receiver_url=<url>", required)]
    pub receiver_url: String,
    /// Folder with ca-cert.pem, server-cert.pem and server-key.pem. Only with tcp.
    #[option("tls_dir=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    /// Whether memory is copied before the guest moves (precopy) or after (postcopy, which is not supported).
    #[option("memory_mode=precopy|postcopy", default = MemoryMode::Precopy)]
    pub memory_mode: MemoryMode,
    /// How long the target waits for a source, in seconds.
    #[option("timeout_s=<seconds>", default = 3600)]
    pub timeout_s: u32,
    /// True to answer as soon as the target listens, instead of when the guest has arrived or cannot.
    #[option("detach=on|off")]
    pub detach: bool,
    /// Descriptors of open taps, for each NIC that had been given some: its id, or its id, a slash and the index of a
    /// VF.
    #[option("net_fds=[<id>@[<fd>,...],...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net_fds: Vec<RestoredNet>,
    /// Backends in place of those of the source, each of the NIC with this id, or of a VF of it: tap=<interface>,
    /// fd=[<fd>,...], socket=<path>, vdpa=<path> or link=down.
    #[option("backends=[<id>[/<VF>]@<key>=<value>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub backends: Vec<RestoredBackend>,
    /// Memory zones that take their memory from other NUMA nodes of this host than those of the source.
    #[option("zone_updates=[<zone>@<node>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zone_updates: Vec<ZoneUpdate>,
    /// What is done if the backend of a NIC, PF or VF cannot be opened. refuse: nothing is received. link-down: it
    /// comes without a link, and is given a backend later (vm.set-vf).
    #[option("on_missing_backend=refuse|link-down", default = OnMissingBackend::Refuse)]
    pub on_missing_backend: OnMissingBackend,
}

/// The body of `vm.resume`, which may be left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResumeOptions {
    /// Whether a guest goes on of which nobody knows whether the target of a migration runs it. The caller has made
    /// sure that it does not.
    pub force: bool,
}

/// What happens if a guest writes faster than its memory can be copied, until the time is up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TimeoutStrategy {
    /// The migration ends, and the source goes on with the guest.
    #[default]
    Cancel,
    /// The guest is stopped for as long as the rest takes.
    Ignore,
}

/// When memory is copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemoryMode {
    /// Before the guest moves.
    #[default]
    Precopy,
    /// After.
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

/// Which side of a migration a VMM is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MigrationRole {
    /// It sends its VM.
    #[default]
    Sender,
    /// It receives one.
    Receiver,
}

/// The answer to `vm.migration-progress`: the migration that goes on, or the last.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationProgress {
    /// Which side this is.
    pub role: MigrationRole,
    /// `active`, `finished`, `failed`, `cancelled`, `guest-shut-down`, `unknown` or `forced`.
    pub state: String,
    /// What it does or did last.
    pub phase: String,
    /// How many passes over the memory are complete.
    pub pass: u32,
    /// The guest's memory, in bytes.
    pub memory_bytes: u64,
    /// What was sent or received, in bytes.
    pub transferred_bytes: u64,
    /// Pages of 4 KiB that were sent or received with their bytes.
    pub pages: u64,
    /// Pages that are zero, of which no byte is sent.
    pub zero_pages: u64,
    /// What is still to be sent, in bytes.
    pub remaining_bytes: u64,
    /// Pages that the guest writes to, in bytes per second.
    pub dirty_bytes_per_s: u64,
    /// What the connections carry, in bytes per second.
    pub bandwidth_bytes_per_s: u64,
    /// The share of their time that vCPUs are held, so that they write less.
    pub throttle_percent: u8,
    /// How long it takes, or took, in milliseconds.
    pub elapsed_ms: u64,
    /// How long the guest would stand still if it were stopped now, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimated_downtime_ms: Option<u64>,
    /// How long it stood still, once it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime: Option<DowntimeParts>,
    /// Why it failed, in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The time in which the guest stands still, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DowntimeParts {
    /// From the first vCPU that stops until the target's run. The parts below add up to it.
    pub total_us: u64,
    /// vCPUs, devices and backends stop.
    pub stop_us: u64,
    /// The state is saved.
    pub save_us: u64,
    /// The rest of the memory and the state are sent.
    pub send_us: u64,
    /// The target loads them.
    pub load_us: u64,
    /// Locks go over, and the target starts the guest.
    pub handover_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_as_in_cloud_hypervisor() {
        let config: SendMigration = "destination_url=tcp:h:1".parse().unwrap();
        assert_eq!(config, serde_json::from_str(r#"{"destination_url": "tcp:h:1"}"#).unwrap());
        assert_eq!((config.downtime_ms, config.timeout_s, config.connections), (300, 3600, 1));
        assert_eq!((config.timeout_strategy, config.memory_mode), (TimeoutStrategy::Cancel, MemoryMode::Precopy));
        assert!(!config.local && config.tls_dir.is_none());
        assert!("local=on".parse::<SendMigration>().is_err());
    }

    #[test]
    fn what_is_written_reads_back() {
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
