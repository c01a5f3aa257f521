//! Ports that compete for an uplink, in virtual time.

use super::*;
use crate::os::clock::testing::StoppedClock;

/// The delay of a worker after a wait.
const LATE: Duration = Duration::from_micros(60);
/// The most frames that a port sends before the others have their turn.
const BATCH: usize = 64;

/// A port and its traffic.
#[derive(Debug, Clone, Copy)]
struct Sender {
    /// The guaranteed rate, in Mbit/s.
    min: u32,
    weight: u8,
    /// The length of its frames in bytes.
    frame: usize,
    /// The rate without any limit, in Mbit/s; `None` if it always has more.
    demand: Option<u32>,
}

/// A port that always has more.
fn greedy(min: u32, weight: u8, frame: usize) -> Sender {
    Sender { min, weight, frame, demand: None }
}

fn rate(mbits: u32) -> NonZeroU32 {
    NonZeroU32::new(mbits).unwrap()
}

fn shares(mbits: u32, senders: &[Sender]) -> Shares {
    let mut shares = Shares::new(rate(mbits), senders.len() as u16, 10);
    for (port, sender) in (0..).zip(senders) {
        shares.set(port, sender.min, sender.weight);
    }
    shares
}

/// The rates of `senders` over a time, in Mbit/s, once the initial content of the buckets is used up.
fn run(clock: &StoppedClock, shares: &mut Shares, senders: &[Sender], time: Duration) -> Vec<f64> {
    let start = clock::now();
    let warm = start + time / 10;
    let mut next = vec![start; senders.len()];
    let mut sent = vec![0_u64; senders.len()];
    while let Some((port, at)) = next.iter().copied().enumerate().min_by_key(|(_, at)| *at) {
        if at > start + time {
            break;
        }
        clock.advance(at.saturating_duration_since(clock::now()));
        let sender = senders[port];
        let index = port as u16;
        for turn in 0.. {
            if let Some(wait) = shares.limited_for(index) {
                assert!(wait <= LONGEST && !wait.is_zero());
                next[port] = clock::now() + wait + LATE;
                break;
            }
            shares.take(index, sender.frame);
            if clock::now() >= warm {
                sent[port] += sender.frame as u64;
            }
            if let Some(demand) = sender.demand {
                next[port] += Duration::from_secs_f64(sender.frame as f64 * 8e-6 / f64::from(demand));
                break;
            }
            if turn == BATCH {
                next[port] = clock::now() + Duration::from_nanos(1);
                break;
            }
        }
    }
    sent.iter().map(|bytes| *bytes as f64 * 8e-6 / (time - time / 10).as_secs_f64()).collect()
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    assert!(
        found.iter().zip(expected).all(|(found, expected)| (found / expected - 1.0).abs() < 0.02),
        "{what}: {found:?}"
    );
}

#[test]
fn ports_get_guarantee_plus_weighted_share_within_2_percent() {
    let clock = StoppedClock::new();
    for frame in [60, 1514, 65_000] {
        for mbits in [10, 100, 1_000, 10_000] {
            // A tenth of it to one, a half to another, and of the other four tenths one, two and five eighths.
            let senders = [greedy(mbits / 10, 10, frame), greedy(mbits / 2, 20, 1514), greedy(0, 50, frame)];
            let time = Duration::from_secs(if mbits < 1000 { 40 } else { 1 });
            let found = run(&clock, &mut shares(mbits, &senders), &senders, time);
            let of = |part: f64| part * f64::from(mbits);
            println!("{frame} bytes, {mbits} Mbit/s: {found:.2?}");
            assert_near(&found, &[of(0.15), of(0.6), of(0.25)], &format!("{frame} {mbits}"));
        }
    }
}

#[test]
fn the_others_have_the_share_that_one_does_not_use() {
    let clock = StoppedClock::new();
    let idle = Sender { demand: Some(50), ..greedy(500, 10, 1514) };
    let senders = [idle, greedy(0, 30, 1514), greedy(100, 10, 1514)];
    let found = run(&clock, &mut shares(1000, &senders), &senders, Duration::from_secs(1));
    assert_near(&found, &[50.0, 637.5, 312.5], "one sends a tenth of what it may");
    let alone = [greedy(0, 1, 1514)];
    assert_near(&run(&clock, &mut shares(1000, &alone), &alone, Duration::from_secs(1)), &[1000.0], "one alone");
    // A port that has stopped is removed after a moment, and gets its share at once when it sends again.
    let two = [greedy(900, 10, 1514), greedy(0, 10, 1514)];
    let mut shares = shares(1000, &two);
    assert_near(&run(&clock, &mut shares, &two, Duration::from_secs(1)), &[950.0, 50.0], "both");
    let quiet = [Sender { demand: Some(1), ..two[0] }, two[1]];
    assert_near(&run(&clock, &mut shares, &quiet, Duration::from_secs(1))[1..], &[999.0], "the other");
    assert_near(&run(&clock, &mut shares, &two, Duration::from_secs(1)), &[950.0, 50.0], "both again");
}

#[test]
fn a_guarantee_or_a_weight_changes_while_ports_compete() {
    let clock = StoppedClock::new();
    let senders = [greedy(0, 10, 1514), greedy(0, 10, 1514)];
    let mut shares = shares(1000, &senders);
    assert_near(&run(&clock, &mut shares, &senders, Duration::from_secs(1)), &[500.0, 500.0], "equal");
    shares.set(0, 600, 10);
    assert_near(&run(&clock, &mut shares, &senders, Duration::from_secs(1)), &[800.0, 200.0], "guaranteed");
    shares.set(1, 0, 30);
    assert_near(&run(&clock, &mut shares, &senders, Duration::from_secs(1)), &[700.0, 300.0], "weighted");
}

/// Checks that 300 ports together send at the uplink's rate, and that a guaranteed port gets its rate.
#[test]
fn many_ports_share_without_any_being_forgotten() {
    let clock = StoppedClock::new();
    let mut senders = vec![greedy(0, 1, 1514); 300];
    senders[7].min = 500;
    let found = run(&clock, &mut shares(1000, &senders), &senders, Duration::from_millis(500));
    let others = found.iter().sum::<f64>() - found[7];
    let part = 500.0 / 300.0;
    assert_near(&[found[7], others], &[500.0 + part, 500.0 - part], "together");
    assert!(found.iter().all(|found| *found > part / 2.0), "{found:.2?}");
}

#[test]
fn the_debt_of_a_port_is_restored() {
    let clock = StoppedClock::new();
    let senders = [greedy(100, 10, 1514), greedy(0, 10, 1514)];
    let mut old = shares(1000, &senders);
    assert_eq!(old.save(0), None);
    while old.limited_for(0).is_none() {
        old.take(0, 65_000);
    }
    let owed = old.save(0).unwrap();
    assert!((1..=65_000 * 8).contains(&owed.missing) && old.save(1).is_none(), "{owed:?}");
    clock.advance(Duration::from_secs(100));
    let mut new = shares(1000, &senders);
    new.spare = 0.0;
    new.restore(0, owed).unwrap();
    assert_eq!(new.save(0), Some(owed));
    // Alone, it makes up for that at the uplink's rate.
    let wait = new.limited_for(0).unwrap();
    assert!(wait >= Duration::from_nanos(owed.missing) && wait <= Duration::from_nanos(owed.missing + 100), "{wait:?}");
    for missing in [u64::MAX, 8 * (MAX_FRAME as u64 + 2)] {
        assert!(new.restore(0, BucketState { missing, burst: 0 }).is_err(), "{missing}");
    }
    assert!(new.restore(0, BucketState { missing: 1, burst: 1 }).is_err());
    assert!(new.restore(9, owed).is_ok(), "there is no such port");
}

#[test]
fn no_rate_and_no_pause_is_too_great() {
    let clock = StoppedClock::new();
    for mbits in [1, u32::MAX] {
        let senders = [greedy(mbits, 100, 1), greedy(0, 1, MAX_FRAME)];
        let mut shares = shares(mbits, &senders);
        for pause in [0, 1, u64::from(u32::MAX)] {
            clock.advance(Duration::from_secs(pause));
            for port in [0, 1, 2, u16::MAX] {
                for _ in 0..100 {
                    let _ = shares.limited_for(port);
                    shares.take(port, MAX_FRAME);
                }
            }
        }
    }
}
