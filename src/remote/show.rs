//! Answers as text for people.

use std::fmt::Write as _;

use serde_json::{Map, Value};
use vm_api::config::{ConsoleConfig, ConsoleMode};
use vm_api::info::VmInfo;

/// A table with columns as wide as their widest cell. The first row is the header.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<_> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    text
}

/// Text of `info`.
pub(crate) fn info(info: &VmInfo) -> String {
    let config = &info.config;
    let mut text = String::new();
    let mut line = |name: &str, value: String| _ = writeln!(text, "{name:<8}{value}");
    line("state", format!("{:?}", info.state));
    let (vcpus, max) = (config.cpus.boot_vcpus, config.cpus.max_vcpus);
    line("cpus", if max == vcpus { vcpus.to_string() } else { format!("{vcpus} of at most {max}") });
    line("memory", format!("{} MiB", info.memory_actual_size >> 20));
    let kernel = config.payload.kernel.as_ref().map_or("none".to_string(), |kernel| kernel.display().to_string());
    line("kernel", kernel);
    if let Some(initramfs) = &config.payload.initramfs {
        line("initrd", initramfs.display().to_string());
    }
    if let Some(cmdline) = &config.payload.cmdline {
        line("cmdline", cmdline.clone());
    }
    line("serial", console(&config.serial));
    line("console", console(&config.console));
    text + "\n" + &table(&devices(info))
}

/// A console, with the path of its pseudo-terminal.
fn console(config: &ConsoleConfig) -> String {
    match (config.mode, &config.file) {
        (ConsoleMode::Pty, Some(path)) => format!("pty {}", path.display()),
        // The name that a virtio console has by default.
        _ => config.to_string().replace(",id=__console", ""),
    }
}

/// The fields of a JSON object, one per line.
pub(crate) fn fields(object: &Map<String, Value>) -> String {
    let mut rows = Vec::new();
    for (name, value) in object {
        match value {
            Value::Object(parts) => {
                rows.extend(parts.iter().map(|(part, value)| vec![format!("{name}.{part}"), plain(value)]));
            }
            value => rows.push(vec![name.clone(), plain(value)]),
        }
    }
    table(&rows)
}

/// A value as a word.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(elements) => elements.iter().map(plain).collect::<Vec<_>>().join(" "),
        value => value.to_string(),
    }
}

/// The devices, with their addresses once the VM is booted.
fn devices(info: &VmInfo) -> Vec<Vec<String>> {
    let bdf = |id: &str| {
        let carrier = info.device_tree.get(&format!("_virtio-pci-{id}"));
        carrier.and_then(|carrier| carrier.pci_bdf.clone()).unwrap_or_else(|| "-".to_string())
    };
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let mut rows = vec![["DEVICE", "ADDRESS", "KIND", ""].map(str::to_string).to_vec()];
    for net in &info.config.net {
        let id = text(&net.id);
        let pool = info.sriov.iter().find(|pool| pool.id == id);
        let vfs = match (pool, net.sriov_vfs) {
            (_, 0) => String::new(),
            (Some(pool), total) => format!(", {} of {total} VFs", if pool.enabled { pool.num_vfs } else { 0 }),
            (None, total) => format!(", {total} VFs reserved"),
        };
        // A vDPA device has an address of its own.
        let mac = net.mac.or(pool.map(|pool| pool.mac.into())).map(|mac| mac.to_string());
        let device = net.backend.vdpa.as_ref().map(|path| path.display().to_string());
        let about = mac.or(device).unwrap_or_default();
        rows.push(vec![id.clone(), bdf(&id), "net".to_string(), format!("{about}{vfs}")]);
    }
    for vdpa in &info.config.vdpa {
        let id = text(&vdpa.id);
        rows.push(vec![id.clone(), bdf(&id), "vdpa".to_string(), vdpa.path.display().to_string()]);
    }
    for disk in &info.config.disks {
        let path = disk.path.as_ref().or(disk.vhost_socket.as_ref());
        let (id, path) = (text(&disk.id), path.map(|path| path.display().to_string()));
        rows.push(vec![id.clone(), bdf(&id), "disk".to_string(), path.unwrap_or_default()]);
    }
    let rng = &info.config.rng;
    let id = text(&rng.id);
    rows.push(vec![id.clone(), bdf(&id), "rng".to_string(), rng.src.display().to_string()]);
    if let Some(vsock) = &info.config.vsock {
        let id = text(&vsock.id);
        let about = format!("cid {}, {}", vsock.cid, vsock.socket.display());
        rows.push(vec![id.clone(), bdf(&id), "vsock".to_string(), about]);
    }
    if let Some(rtc) = &info.config.rtc {
        let id = text(&rtc.id);
        rows.push(vec![id.clone(), bdf(&id), "rtc".to_string(), "UTC".to_string()]);
    }
    for fs in &info.config.fs {
        let id = text(&fs.id);
        rows.push(vec![id.clone(), bdf(&id), "fs".to_string(), format!("{}, {}", fs.tag, fs.socket.display())]);
    }
    for device in &info.config.generic_vhost_user {
        let id = text(&device.id);
        rows.push(vec![id.clone(), bdf(&id), "vhost-user".to_string(), device.socket.display().to_string()]);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["A", "LONG"], ["value", "b"]].map(|row| row.map(str::to_string).to_vec());
        assert_eq!(table(&rows), "A      LONG\nvalue  b\n");
    }

    #[test]
    fn an_object_is_shown_with_a_line_for_each_field() {
        let object = serde_json::json!({"id": "pf0", "pid": 7, "features": ["a", "b"], "downtime": {"total_us": 5}});
        let shown = fields(object.as_object().unwrap());
        assert_eq!(
            shown,
            "downtime.total_us  5\nfeatures           a b\nid                 pf0\npid                7\n"
        );
    }

    #[test]
    fn a_console_that_is_a_pseudo_terminal_is_shown_with_its_path() {
        let shown = |json: Value| console(&serde_json::from_value(json).unwrap());
        assert_eq!(shown(serde_json::json!({"mode": "Pty", "file": "/dev/pts/7"})), "pty /dev/pts/7");
        assert_eq!(shown(serde_json::json!({"mode": "Pty"})), "pty");
        assert_eq!(shown(serde_json::json!({"mode": "Tty", "id": "__console"})), "tty");
        assert_eq!(shown(serde_json::json!({"mode": "File", "file": "/tmp/log"})), "file=/tmp/log");
    }

    #[test]
    fn a_nic_is_shown_with_its_address_or_the_device_that_has_one() {
        let told = serde_json::json!({
            "config": {
                "net": [{"id": "a", "mac": "52:54:00:00:00:01"}, {"id": "b", "vdpa": "/dev/vhost-vdpa-0"}],
                "vdpa": [{"id": "v", "path": "/dev/vhost-vdpa-1"}],
            },
            "state": "Created", "memory_actual_size": 1 << 29,
        });
        let shown: Vec<_> = devices(&serde_json::from_value(told).unwrap()).iter().map(|row| row.join(" ")).collect();
        assert_eq!(
            shown[1..4],
            ["a - net 52:54:00:00:00:01", "b - net /dev/vhost-vdpa-0", "v - vdpa /dev/vhost-vdpa-1"]
        );
    }
}
