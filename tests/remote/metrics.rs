//! `GET /metrics`, requested by `ch-remote` and parsed in Prometheus' format.

use std::collections::{BTreeMap, HashMap};

use crate::files::Files;
use crate::vmm::Vmm;

/// A series: its name and its labels.
type Series = (String, BTreeMap<String, String>);

fn parse(text: &str) -> HashMap<Series, f64> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let parsed = samples.map(|line| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        assert!(name.chars().all(is_name), "{line}");
        let labels = labels.strip_suffix('}').unwrap().split(',').filter(|label| !label.is_empty());
        let label = |label: &str| {
            let (name, value) = label.split_once('=').unwrap();
            let value = value.strip_prefix('"').unwrap().strip_suffix('"').unwrap();
            (name.to_string(), value.to_string())
        };
        ((name.to_string(), labels.map(label).collect()), value.parse().unwrap())
    });
    let parsed: Vec<_> = parsed.collect();
    let (count, map): (_, HashMap<_, _>) = (parsed.len(), parsed.into_iter().collect());
    assert_eq!(map.len(), count, "a series appears twice: {text}");
    map
}

fn value(metrics: &HashMap<Series, f64>, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let labels = labels.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    metrics.get(&(format!("cloud_hypervisor_{name}"), labels)).copied()
}

#[test]
fn a_counter_is_explained_without_a_vm() {
    let vmm = Vmm::start(&[]);
    let text = vmm.done(&["counters", "--explain", "rx_stale"]);
    assert!(text.starts_with("net rx_stale (frames): Frames that arrived before the driver was ready"), "{text}");
}

#[test]
fn a_pf_and_its_vfs_have_metrics_of_their_own() {
    let vmm = Vmm::start(&[]);
    let before = parse(&vmm.done(&["metrics"]));
    assert_eq!(value(&before, "vm_state", &[("state", "Running")]), Some(0.0));
    let files = Files::new();
    let kernel = files.idle_kernel();
    vmm.done(&["create", "--kernel", &kernel, "--memory", "size=64M", "--net", "id=pf0,tap=rmm0,sriov_vfs=4"]);
    vmm.done(&["boot"]);
    vmm.done(&["set-vf", "pf0", "3", "--link", "down"]);
    let metrics = parse(&vmm.done(&["metrics"]));
    let (pf, vf3) = (&[("device", "pf0")][..], &[("device", "pf0"), ("vf", "3")][..]);
    assert_eq!(value(&metrics, "vm_state", &[("state", "Running")]), Some(1.0));
    assert_eq!(value(&metrics, "sriov_vfs_reserved", pf), Some(4.0));
    assert_eq!(value(&metrics, "sriov_vfs_enabled", pf), Some(0.0));
    assert_eq!((value(&metrics, "link_up", pf), value(&metrics, "link_up", vf3)), (Some(1.0), Some(0.0)));
    assert_eq!((value(&metrics, "driver_up", pf), value(&metrics, "driver_up", vf3)), (Some(0.0), Some(0.0)));
    assert_eq!(value(&metrics, "net_rx_bytes_total", pf), Some(0.0));
    assert_eq!(value(&metrics, "net_rx_bytes_total", vf3), None);
    assert!(value(&metrics, "uptime_seconds", &[]).unwrap() > 0.0);
    let threads = metrics[&("process_threads".to_string(), BTreeMap::new())];
    assert!(threads >= 2.0, "{threads}");
}
