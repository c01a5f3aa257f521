use std::fs::OpenOptions;
use std::io::{BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;

use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use super::*;
use crate::telemetry::monitor::EventMonitor;

fn fifo() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("events");
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    (folder, path)
}

fn start(path: &Path) -> (EventStream, Events) {
    EventStream::start(EventMonitor::Path(path.to_owned()).open().unwrap(), Instant::now()).unwrap()
}

fn values(text: &str) -> Vec<Value> {
    serde_json::Deserializer::from_str(text).into_iter().map(Result::unwrap).collect()
}

/// Source and name of each event.
fn names(text: &str) -> Vec<String> {
    let name = |value: &Value| format!("{}:{}", value["source"].as_str().unwrap(), value["event"].as_str().unwrap());
    values(text).iter().map(name).collect()
}

#[test]
fn an_event_is_pretty_json_and_an_empty_line() {
    let now = || (Duration::new(3, 51_528_800), "2024-01-15T10:30:45.123456Z".to_string());
    let without = text(now(), Source::Vm, "booted", &[]);
    let expected = "{\n  \"timestamp\": {\n    \"secs\": 3,\n    \"nanos\": 51528800\n  },\n  \
                    \"time\": \"2024-01-15T10:30:45.123456Z\",\n  \"source\": \"vm\",\n  \
                    \"event\": \"booted\",\n  \"properties\": null\n}\n\n";
    assert_eq!(without, expected);
    let with = text(now(), Source::VirtioDevice, "reset", &[("id", "pf0"), ("index", "3")]);
    let value: Value = serde_json::from_str(&with).unwrap();
    assert_eq!(value["source"], json!("virtio-device"));
    assert_eq!(value["properties"], json!({"id": "pf0", "index": "3"}));
}

proptest! {
    #[test]
    fn an_event_fits_a_page_and_its_braces_count(id in any::<String>()) {
        let properties = [("id", id.as_str()), ("index", "65535")];
        let text = text((Duration::MAX, wall_clock::now()), Source::Sriov, "vf-driver-ok", &properties);
        prop_assert!(text.len() < 4096 && text.is_ascii());
        let braces = |brace| text.bytes().filter(|byte| *byte == brace).count();
        prop_assert_eq!((braces(b'{'), braces(b'}')), (3, 3));
        let value: Value = serde_json::from_str(&text).unwrap();
        let shortened: String = id.chars().take(LONGEST_TEXT).collect();
        prop_assert_eq!(value["properties"]["id"].as_str(), Some(shortened.as_str()));
    }
}

#[test]
fn an_event_with_two_names_of_the_longest_escapes_fits_a_page() {
    let long = "\u{1f980}".repeat(10_000);
    let properties = [("id", long.as_str()), ("index", "65535"), ("backend", &long)];
    let text = text((Duration::MAX, wall_clock::now()), Source::Sriov, "backend-restored", &properties);
    assert!(text.len() < 4096, "{}", text.len());
    let value: Value = serde_json::from_str(&text).unwrap();
    let shown = |name: &str| value["properties"][name].as_str().unwrap().chars().count();
    assert_eq!((shown("id"), shown("index")), (LONGEST_TEXT, 5));
    assert!(shown("backend") > 30);
}

#[test]
fn an_id_of_braces_and_of_the_longest_escapes_fits_a_page() {
    for id in ["{".repeat(10_000), "\u{1f980}".repeat(10_000), "\\\"{".repeat(10_000)] {
        let text = text(
            (Duration::MAX, wall_clock::now()),
            Source::Vm,
            "device-removed",
            &[("id", &id), ("bdf", "0000:00:1f.0")],
        );
        assert!(text.len() < 4096, "{}", text.len());
        serde_json::from_str::<Value>(&text).unwrap();
    }
}

#[test]
fn a_pipe_whose_reader_comes_first_gets_all_events() {
    let (_folder, path) = fifo();
    let reader = {
        let path = path.clone();
        thread::spawn(move || std::fs::read_to_string(path).unwrap())
    };
    // The reader blocks in open until the writer opens the pipe.
    let (stream, events) = start(&path);
    events.vmm("starting");
    events.vm("booted");
    drop(stream);
    drop(events);
    assert_eq!(names(&reader.join().unwrap()), ["vmm:starting", "vm:booted"]);
}

#[test]
fn a_pipe_whose_reader_comes_last_gets_all_events() {
    let (_folder, path) = fifo();
    let (stream, events) = start(&path);
    events.vmm("starting");
    events.vm("booted");
    // Nothing has waited for the reader so far.
    let reader = thread::spawn(move || std::fs::read_to_string(path).unwrap());
    events.vmm("shutdown");
    drop(stream);
    assert_eq!(names(&reader.join().unwrap()), ["vmm:starting", "vm:booted", "vmm:shutdown"]);
}

#[test]
fn no_thread_waits_for_a_reader_that_never_comes() {
    let (_folder, path) = fifo();
    let (stream, events) = start(&path);
    let began = Instant::now();
    for _ in 0..10 * MOST_WAITING {
        events.vm("resized");
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(events.dropped(), 9 * MOST_WAITING as u64);
    let ending = Instant::now();
    drop(stream);
    assert!(ending.elapsed() < 2 * PATIENCE, "{:?}", ending.elapsed());
}

#[test]
fn a_slow_reader_loses_whole_events_and_they_are_counted() {
    const TOLD: usize = 4000;
    let (_folder, path) = fifo();
    let opened = {
        let path = path.clone();
        thread::spawn(move || File::open(path).unwrap())
    };
    let (stream, events) = start(&path);
    let mut reader = BufReader::new(opened.join().unwrap());
    // Far more than pipe and queue hold.
    for _ in 0..TOLD {
        events.vm("resized");
    }
    let dropped = usize::try_from(events.dropped()).unwrap();
    assert!(dropped > 0);
    let reading = thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    });
    drop(stream);
    assert_eq!(names(&reading.join().unwrap()).len(), TOLD - dropped);
}

#[test]
fn a_reader_that_reconnects_gets_the_events_from_then_on() {
    let (_folder, path) = fifo();
    let open = |path: &Path| {
        let path = path.to_owned();
        thread::spawn(move || File::open(path).unwrap())
    };
    let first = open(&path);
    let (stream, events) = start(&path);
    drop(first.join().unwrap());
    // A process forked by another test may hold a copy for a moment.
    let has_reader = || OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&path).is_ok();
    while has_reader() {
        thread::yield_now();
    }
    events.vm("paused");
    while events.dropped() == 0 {
        thread::yield_now();
    }
    let mut second = open(&path).join().unwrap();
    events.vm("resumed");
    drop(stream);
    let mut text = String::new();
    second.read_to_string(&mut text).unwrap();
    assert_eq!(names(&text), ["vm:resumed"]);
}

#[test]
fn events_are_appended_to_an_existing_file() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("events");
    for _ in 0..2 {
        let (stream, events) = start(&path);
        events.vmm("starting");
        drop(stream);
    }
    assert_eq!(names(&std::fs::read_to_string(&path).unwrap()), ["vmm:starting", "vmm:starting"]);
}

#[test]
fn without_a_listener_nothing_happens() {
    let events = Events::default();
    events.vm("booted");
    assert_eq!(events.dropped(), 0);
}

/// State that counts checks and reports an event at each.
struct Restless(AtomicU64);

impl Watched for Restless {
    fn look(&self, tell: Tell<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        tell(Source::Sriov, "vfs-enabled", &[("id", "pf0"), ("num_vfs", "8")]);
    }
}

#[test]
fn events_that_a_guest_causes_are_written_at_a_limited_rate() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("events");
    let (stream, events) = start(&path);
    let guest = Arc::new(Restless(AtomicU64::new(0)));
    let watched: Arc<dyn Watched> = guest.clone();
    events.watch(Arc::downgrade(&watched));
    let began = Instant::now();
    while guest.0.load(Ordering::Relaxed) == 0 || began.elapsed() < 10 * PACE {
        events.look();
        thread::yield_now();
    }
    // Events of the VM do not wait for the next check.
    events.vm("paused");
    while guest.0.load(Ordering::Relaxed) < 2 {
        thread::yield_now();
    }
    drop(stream);
    let looks = guest.0.load(Ordering::Relaxed);
    let most = began.elapsed().as_millis() / PACE.as_millis() + 1;
    assert!(u128::from(looks) <= most, "{looks} looks, {most} at most");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(names(&text).contains(&"vm:paused".to_string()));
    assert_eq!(values(&text)[0]["properties"], json!({"id": "pf0", "num_vfs": "8"}));
}

#[test]
fn events_that_a_guest_causes_without_end_become_rare() {
    const MOST: u64 = 8;
    let folder = tempdir().unwrap();
    let path = folder.path().join("events");
    let output = EventMonitor::Path(path.clone()).open().unwrap();
    let limit = RateLimit { size: MOST, one_time_burst: 0, refill: Duration::from_secs(100_000) };
    let (stream, events) = EventStream::limited(output, Instant::now(), limit).unwrap();
    let guest = Arc::new(Restless(AtomicU64::new(0)));
    let watched: Arc<dyn Watched> = guest.clone();
    events.watch(Arc::downgrade(&watched));
    let began = Instant::now();
    while guest.0.load(Ordering::Relaxed) < MOST || began.elapsed() < 4 * MOST as u32 * PACE {
        events.look();
        thread::yield_now();
    }
    // Events of the host are written at once.
    events.vm("paused");
    drop(stream);
    let names = names(&std::fs::read_to_string(&path).unwrap());
    let of_guest = names.iter().filter(|name| *name == "sriov:vfs-enabled").count();
    assert_eq!((of_guest as u64, names.last().map(String::as_str)), (MOST, Some("vm:paused")));
}
