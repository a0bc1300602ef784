//! How long a message takes through stations that work at the same time (E-UDP §4.4).
//!
//! A message is cut into chunks. Station i takes a chunk when the station before it gave it away and when its own last chunk is done:
//!
//! ```text
//! f(i, j) = max(f(i−1, j), f(i, j−1)) + b_i θ_j, + w_i for a window's first chunk and + a_i for a message's
//! ```
//!
//! Chunks are windows, or packets: then a station gives away each, or all of a window when it is whole, f(i−1, the window's last) for f(i−1, j).
//! Two things that a window's lowest frame decides (I5) are of LM's own. The end of a window lies below that frame of the next one, and is given
//! away when it landed: f(i−1, the next window's last). And that frame is not posted before the first packet of the window below it landed, nor
//! sent before word of that came back: f(i, the window's last) ≥ f(i+2, the first of the window before) + the credit's way.
//! Stations that share a core take turns on it. No I/O, no clock.

/// What a station costs, in nanoseconds. Packets are of one length: what each costs is part of the byte's.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(super) struct Station {
    pub(super) message_ns: f64,
    pub(super) window_ns: f64,
    pub(super) byte_ns: f64,
    /// Stations with the same number never work at the same time.
    pub(super) core: usize,
    pub(super) gives: Gives,
    /// How long word takes that the station behind the next one has the first chunk of a window, for which the last chunk of the window behind
    /// it waits; `None`: it waits for nobody.
    pub(super) credit_ns: Option<f64>,
}

/// When a station gives a chunk away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(super) enum Gives {
    /// When it is done.
    #[default]
    Each,
    /// When all of its window is done.
    Window,
    /// When all of the window behind that is done, too, if there is one.
    WindowBelow,
}

impl Station {
    /// What so much work takes alone.
    pub(super) fn alone_ns(&self, windows: u64, bytes: u64) -> f64 {
        self.message_ns + self.window_ns * windows as f64 + self.byte_ns * bytes as f64
    }
}

/// What a station takes at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Chunk {
    pub(super) bytes: u64,
    /// Of a message, and of a window.
    pub(super) is_first: bool,
    pub(super) begins_window: bool,
    /// Chunks of its window behind it.
    pub(super) behind: usize,
}

/// A message in windows of `grain` bytes, a multiple of the packet's; the last packet and window are shorter.
pub(super) fn chunks(len: u64, grain: u64, packet: u64) -> Vec<Chunk> {
    let starts = (0..len).step_by(packet as usize);
    let chunk = |start: u64| {
        let end = len.min(start / grain * grain + grain);
        Chunk {
            bytes: packet.min(len - start),
            is_first: start == 0,
            begins_window: start.is_multiple_of(grain),
            behind: ((end - start).div_ceil(packet) - 1) as usize,
        }
    };
    starts.map(chunk).collect()
}

/// When the last station has done the last chunk. Of two stations that could use a core, the one goes first that is inside a window, then the
/// one that could begin earlier, then the later station.
pub(super) fn finished_ns(stations: &[Station], chunks: &[Chunk]) -> f64 {
    let of_window = chunks.first().map_or(1, |chunk| chunk.behind + 1);
    let cores = stations.iter().map(|station| station.core + 1).max().unwrap_or(0);
    let mut free_ns = vec![0f64; cores];
    let mut done_ns = vec![Vec::with_capacity(chunks.len()); stations.len()];
    loop {
        // When each station could begin with its next chunk, if that is there.
        let ready = (0..stations.len()).rev().filter_map(|i| {
            let j = done_ns[i].len();
            let come_ns = match i {
                0 => (j < chunks.len()).then_some(0.0),
                _ if j == chunks.len() => None,
                _ => {
                    let given = match stations[i - 1].gives {
                        Gives::Each => j,
                        Gives::Window => j + chunks[j].behind,
                        Gives::WindowBelow => (j + chunks[j].behind + of_window).min(chunks.len() - 1),
                    };
                    done_ns[i - 1].get(given).copied()
                }
            }?;
            let come_ns = match stations[i].credit_ns {
                Some(credit_ns) if chunks[j].behind == 0 && j >= of_window => {
                    let before = (j / of_window - 1) * of_window;
                    f64::max(come_ns, done_ns[i + 2].get(before)? + credit_ns)
                }
                _ => come_ns,
            };
            let last_ns = done_ns[i].last().copied().unwrap_or(0.0);
            let ready_ns = f64::max(come_ns, last_ns);
            let begins_ns = ready_ns.max(free_ns[stations[i].core]);
            Some(((begins_ns, chunks[j].begins_window, ready_ns), i, j))
        });
        let next = ready.min_by(|a, b| a.0.partial_cmp(&b.0).expect("costs are numbers"));
        let Some(((begins_ns, ..), i, j)) = next else {
            return done_ns
                .last()
                .and_then(|done| done.last().copied())
                .unwrap_or(0.0);
        };
        let (station, chunk) = (stations[i], chunks[j]);
        let first_ns = if chunk.is_first { station.message_ns } else { 0.0 };
        let window_ns = if chunk.begins_window {
            station.window_ns
        } else {
            0.0
        };
        let ends_ns = begins_ns + first_ns + window_ns + station.byte_ns * chunk.bytes as f64;
        free_ns[station.core] = ends_ns;
        done_ns[i].push(ends_ns);
    }
}

/// How long one message takes, cut into windows of `grain` bytes and these into packets.
pub(super) fn latency_ns(stations: &[Station], len: u64, grain: u64, packet: u64) -> f64 {
    finished_ns(stations, &chunks(len, grain, packet))
}

/// How long each of many such messages takes, whatever the grain of their overlap (equations 2 and 4): as long as the busiest core, or as word of
/// every other window.
pub(super) fn period_ns(stations: &[Station], len: u64, grain: u64) -> f64 {
    let windows = len.div_ceil(grain);
    let mut busy_ns = vec![0f64; stations.iter().map(|station| station.core + 1).max().unwrap_or(0)];
    for station in stations {
        busy_ns[station.core] += station.alone_ns(windows, len);
    }
    let credit_ns = stations.iter().filter_map(|station| station.credit_ns);
    let words_ns = credit_ns.map(|credit_ns| credit_ns * windows as f64 / 2.0);
    busy_ns.into_iter().chain(words_ns).fold(0.0, f64::max)
}

/// What a station took for all of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) windows: u64,
    pub(super) bytes: u64,
    pub(super) took_ns: f64,
}

/// Relative errors beyond this one count linearly (Huber).
const HUBER: f64 = 0.05;

/// Huber's loss of a relative error.
pub(super) fn loss(error: f64) -> f64 {
    match error.abs() {
        small if small <= HUBER => small * small / 2.0,
        large => HUBER * (large - HUBER / 2.0),
    }
}

/// The costs, none below 0, that explain what was taken: least squares of relative errors with Huber's loss, by weights that are found anew.
pub(super) fn fit(points: &[Point], core: usize) -> Station {
    let row = |point: &Point| [1.0, point.windows as f64, point.bytes as f64].map(|x| x / point.took_ns);
    let rows: Vec<_> = points
        .iter()
        .filter(|point| point.took_ns > 0.0)
        .map(row)
        .collect();
    let mut used = [true; 3];
    let mut costs = [0.0; 3];
    loop {
        let mut weights = vec![1.0; rows.len()];
        for _ in 0..50 {
            costs = weighted(&rows, &weights, used);
            for (weight, row) in weights.iter_mut().zip(&rows) {
                let error = (row.iter().zip(costs).map(|(x, cost)| x * cost).sum::<f64>() - 1.0).abs();
                *weight = if error <= HUBER { 1.0 } else { HUBER / error };
            }
        }
        let least = (0..3)
            .min_by(|&a, &b| costs[a].total_cmp(&costs[b]))
            .expect("three");
        if costs[least] >= 0.0 {
            let [message_ns, window_ns, byte_ns] = costs;
            return Station {
                message_ns,
                window_ns,
                byte_ns,
                core,
                ..Station::default()
            };
        }
        used[least] = false;
    }
}

/// The costs with the least sum of squares of `row · costs − 1`, those aside 0: normal equations, each column at its own scale, by elimination.
fn weighted(rows: &[[f64; 3]], weights: &[f64], used: [bool; 3]) -> [f64; 3] {
    let scale: [f64; 3] = std::array::from_fn(|i| {
        let most = rows.iter().map(|row| row[i]).fold(0.0, f64::max);
        if most > 0.0 { most } else { 1.0 }
    });
    let mut system = [[0.0; 4]; 3];
    for (row, weight) in rows.iter().zip(weights) {
        for i in 0..3 {
            for j in 0..3 {
                system[i][j] += weight * row[i] / scale[i] * row[j] / scale[j];
            }
            system[i][3] += weight * row[i] / scale[i];
        }
    }
    for i in 0..3 {
        if !used[i] {
            (0..3).for_each(|other| system[other][i] = 0.0);
            system[i] = [0.0; 4];
        }
        // Columns that say the same have the last one be 0.
        if system[i][i] < 1e-9 {
            system[i] = [0.0; 4];
            system[i][i] = 1.0;
        }
        for other in 0..3 {
            if other != i {
                let times = system[other][i] / system[i][i];
                (0..4).for_each(|j| system[other][j] -= times * system[i][j]);
            }
        }
    }
    std::array::from_fn(|i| system[i][3] / system[i][i] / scale[i])
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
