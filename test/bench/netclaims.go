package main

// netTitles are the titles of the rows of networks.
var netTitles = map[string]string{
	"N1": "Throughput of TCP: datagram mode against wireguard-go",
	"N2": "Throughput of TCP: connected mode against datagram mode",
	"N3": "Round trips of 64 bytes: both modes against wireguard-go",
	"N4": "CPU time of the two daemons: both modes against wireguard-go",
	"N5": "What an overlay costs: both modes and wireguard-go against veth alone",
}

// netClaims lists the rows of networks.
func netClaims() (all []claim) {
	wg, below := []string{wireguard}, []string{plainVeth}
	one, four := streams(1), streams(4)
	for _, w := range []workload{one, four} {
		all = append(all,
			claim{"N1", w, gigabits, datagram, wg, nil, 0.9},
			claim{"N2", w, gigabits, connected, []string{datagram}, nil, 2},
			claim{"N4", w, daemonsPerGB, datagram, wg, nil, 0},
			claim{"N4", w, daemonsPerGB, connected, wg, nil, 0})
		for _, name := range []string{datagram, connected, wireguard} {
			all = append(all, claim{"N5", w, gigabits, name, below, nil, 0})
		}
	}
	for _, w := range []workload{roundTrips("tcp"), roundTrips("udp")} {
		for _, name := range []string{datagram, connected} {
			all = append(all,
				claim{"N3", w, trip50, name, wg, nil, tripTarget},
				claim{"N3", w, trip99, name, wg, nil, 0})
		}
		for _, name := range []string{datagram, connected, wireguard} {
			all = append(all, claim{"N5", w, trip50, name, below, nil, 0})
		}
	}
	return all
}

// tripTarget is a round trip of at most 1.5 times that of wireguard-go, as a
// ratio above 1 that means better.
const tripTarget = 0.67

const netDefaults = "product defaults, rocev2 with the path MTU that the cable carries; the daemons of a network have the two CPUs with everything else"
