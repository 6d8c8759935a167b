package metrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// daemon is a client daemon with given objects.
type daemon struct {
	controlpb.UnimplementedClientDaemonServer
	info     controlpb.DaemonInfo
	sessions controlpb.SessionList
	stats    controlpb.PathStatsReply
	devices  controlpb.ClientDeviceList
	latency  controlpb.DeviceStatsList
	err      error
}

func (d *daemon) Info(context.Context, *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	return &d.info, d.err
}
func (d *daemon) ListSessions(context.Context, *controlpb.ListRequest) (*controlpb.SessionList, error) {
	return &d.sessions, nil
}
func (d *daemon) PathStats(_ context.Context, r *controlpb.PathRequest) (*controlpb.PathStatsReply, error) {
	if r.Id == 99 {
		return nil, errors.New("gone")
	}
	return &d.stats, nil
}
func (d *daemon) ListDevices(context.Context, *controlpb.ListRequest) (*controlpb.ClientDeviceList, error) {
	return &d.devices, nil
}
func (d *daemon) DeviceStats(context.Context, *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	return &d.latency, nil
}

func busyDaemon() *daemon {
	d := &daemon{}
	d.info.Version = "1.2"
	d.info.PumpStats = []*controlpb.PumpStats{{Name: "clt0", Loops: 9, Sleeps: 3, Wakes: 2, SpinHits: 5, SpinMisses: 1}}
	d.info.Plugins = []*controlpb.Plugin{{Name: "nbd", Kind: "frontend", State: "running", Restarts: 2}}
	d.info.FabricCounters = []*controlpb.FabricCounter{
		{Fabric: "rocev2", Name: "dropped", Reason: "icrc", Value: 7}, {Fabric: "iwarp", Name: "sent", Bytes: true, Value: 1000},
	}
	d.sessions.Sessions = []*controlpb.Session{{Name: "s", State: "connected", ServerName: "storage", Paths: []*controlpb.Path{
		{Session: "s", Id: 1, State: "connected", Fabric: "iwarp", Security: &controlpb.Security{
			Protocol: "TLS 1.3", Cipher: "AES_128_GCM", Peer: "dns:storage.example", ExpiresUnixMs: 1_900_000_000_500}},
		{Session: "s", Id: 2, State: "reconnecting", Fabric: "rocev2"},
		{Session: "s", Id: 99, State: "closed", Fabric: "rocev2"},
	}}}
	d.stats = controlpb.PathStatsReply{ReadCount: 10, ReadBytes: 4096, WriteCount: 20, WriteBytes: 8192, Inflight: 3,
		Reconnects: 4, ReconnectsFailed: 5, Failovers: 6, LatencyNs: 250_000}
	d.devices.Devices = []*controlpb.ClientDevice{{Name: "rnbd0", State: "open", Path: "disk.img", Session: "s", RxSectors: 8, TxSectors: 16, Inflight: 2, Openers: 1,
		Limits: &controlpb.Limits{Size: 1 << 20}}}
	d.latency.Devices = []*controlpb.DeviceStats{{Device: "rnbd0", Stages: []*controlpb.StageStats{{Stage: "wire", Op: "read",
		Latency: &controlpb.Histogram{Count: 6, SumNs: 5_000_000, Buckets: []*controlpb.HistogramBucket{
			{UpperNs: 1 << 10, Count: 1}, {UpperNs: 1<<10 + 1<<8, Count: 2}, {UpperNs: 1 << 20, Count: 2}, {UpperNs: 1<<64 - 1, Count: 1},
		}}}}}}
	d.latency.Devices[0].Failed = []*controlpb.FailedRequests{{Stage: "wire", Errno: "EIO", Count: 4}}
	d.latency.Devices[0].Hung = []*controlpb.HungRequests{{Stage: "wire", Path: "a", Count: 2, OldestNs: 90e9}, {Stage: "wire", Path: "b", Count: 3, OldestNs: 20e9}}
	return d
}

func TestNamesAndTypesAreAsPrometheusAsks(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(Client(busyDaemon()))
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// scrape asks a page as Prometheus does.
func scrape(t *testing.T, c *Daemon) map[string]*dto.MetricFamily {
	t.Helper()
	p, err := Listen("127.0.0.1:0", c, nil, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	r, err := http.Get("http://" + p.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(r.Body)
		t.Fatalf("%s: %s", r.Status, text)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// value returns the series with the labels in want: "name{a=b,c=d}".
func value(t *testing.T, families map[string]*dto.MetricFamily, want string) *dto.Metric {
	t.Helper()
	name, _, _ := strings.Cut(want, "{")
	for _, m := range families[name].GetMetric() {
		var labels []string
		for _, l := range m.Label {
			labels = append(labels, l.GetName()+"="+l.GetValue())
		}
		if name+"{"+strings.Join(labels, ",")+"}" == want {
			return m
		}
	}
	t.Errorf("there is no %s", want)
	return &dto.Metric{}
}

func TestScrape(t *testing.T) {
	families := scrape(t, Client(busyDaemon()))
	for want, n := range map[string]float64{
		"rnbd_client_build_info{version=1.2}":                                                                                        1,
		"rnbd_client_sessions{state=connected}":                                                                                      1,
		"rnbd_client_sessions{state=disconnected}":                                                                                   0,
		"rnbd_client_path_connected{fabric=iwarp,path=1,session=s}":                                                                  1,
		"rnbd_client_path_connected{fabric=rocev2,path=2,session=s}":                                                                 0,
		"rnbd_client_path_read_requests_total{fabric=iwarp,path=1,session=s}":                                                        10,
		"rnbd_client_path_write_bytes_total{fabric=iwarp,path=1,session=s}":                                                          8192,
		"rnbd_client_path_inflight_requests{fabric=iwarp,path=1,session=s}":                                                          3,
		"rnbd_client_path_reconnects_total{fabric=iwarp,path=1,result=failed,session=s}":                                             5,
		"rnbd_client_path_heartbeat_latency_seconds{fabric=iwarp,path=1,session=s}":                                                  0.00025,
		"rnbd_client_path_security_info{cipher=AES_128_GCM,fabric=iwarp,path=1,peer=dns:storage.example,protocol=TLS 1.3,session=s}": 1,
		"rnbd_client_path_peer_expiry_seconds{fabric=iwarp,path=1,session=s}":                                                        1_900_000_000.5,
		"rnbd_client_device_open{device=rnbd0}":                                                                                      1,
		"rnbd_client_device_read_bytes_total{device=rnbd0}":                                                                          4096,
		"rnbd_client_device_written_bytes_total{device=rnbd0}":                                                                       8192,
		"rnbd_client_pump_spins_total{pump=clt0,result=hit}":                                                                         5,
		"rnbd_client_plugin_up{kind=frontend,plugin=nbd}":                                                                            1,
		"rnbd_client_plugin_restarts_total{kind=frontend,plugin=nbd}":                                                                2,
		"rnbd_client_fabric_events_total{event=dropped,fabric=rocev2,reason=icrc}":                                                   7,
		"rnbd_client_plugin_state{kind=frontend,plugin=nbd,state=running}":                                                           1,
		"rnbd_client_plugin_state{kind=frontend,plugin=nbd,state=failed}":                                                            0,
		"rnbd_client_device_state{device=rnbd0,state=open}":                                                                          1,
		"rnbd_client_device_state{device=rnbd0,state=closed}":                                                                        0,
		"rnbd_client_device_failed_requests_total{device=rnbd0,errno=EIO,stage=wire}":                                                4,
		"rnbd_client_device_hung_requests{device=rnbd0,stage=wire}":                                                                  5,
		"rnbd_client_device_hung_requests{device=rnbd0,stage=queue}":                                                                 0,
		"rnbd_client_device_oldest_hung_request_seconds{device=rnbd0}":                                                               90,
		"rnbd_device_info{device=rnbd0,mapping_path=disk.img,server=storage,session=s}":                                              1,
		"rnbd_client_fabric_bytes_total{fabric=iwarp,what=sent}":                                                                     1000,
	} {
		m := value(t, families, want)
		if got := m.GetGauge().GetValue() + m.GetCounter().GetValue(); got != n {
			t.Errorf("%s is %v, want %v", want, got, n)
		}
	}
	for _, name := range []string{"path_security_info", "path_peer_expiry_seconds"} {
		if n := len(families["rnbd_client_"+name].GetMetric()); n != 1 {
			t.Errorf("%s has %d series, want one: a path without protection has none", name, n)
		}
	}
	if families["go_goroutines"] == nil || families["process_open_fds"] == nil {
		t.Error("nothing of the process itself")
	}
	for _, m := range families["rnbd_client_path_connected"].GetMetric() {
		if strings.Contains(m.String(), "99") {
			t.Errorf("a path that has gone: %v", m)
		}
	}
	h := value(t, families, "rnbd_client_request_duration_seconds{device=rnbd0,op=read,stage=wire}").GetHistogram()
	if h.GetSampleCount() != 6 || h.GetSampleSum() != 0.005 {
		t.Errorf("%d requests in %v s", h.GetSampleCount(), h.GetSampleSum())
	}
	var got []uint64
	for _, b := range h.GetBucket()[:6] {
		got = append(got, b.GetCumulativeCount())
	}
	if fmt.Sprint(got) != "[1 3 3 3 3 3]" || h.GetBucket()[0].GetUpperBound() != 1.024e-06 {
		t.Errorf("buckets %v, first below %v s", got, h.GetBucket()[0].GetUpperBound())
	}
}

// Clients cannot make a page grow: names beyond the first hundred are counted
// as one.
func TestSeriesAreBounded(t *testing.T) {
	d := busyDaemon()
	d.sessions.Sessions, d.devices.Devices, d.latency.Devices = nil, nil, nil
	for i := range 3 * maxNames {
		name := fmt.Sprintf("s%04d\xff", i)
		d.sessions.Sessions = append(d.sessions.Sessions, &controlpb.Session{Name: name, State: "connected",
			Paths: []*controlpb.Path{{Session: name, Id: uint32(1000 + i), State: "connected", Fabric: "iwarp",
				Security: &controlpb.Security{Protocol: "TLS 1.3", Peer: "cn:" + name, ExpiresUnixMs: 1_900_000_000_000}}}})
		device := fmt.Sprintf("d%04d", i)
		d.devices.Devices = append(d.devices.Devices, &controlpb.ClientDevice{Name: device, State: "open"})
		d.latency.Devices = append(d.latency.Devices, &controlpb.DeviceStats{Device: device, Stages: busyDaemonStages()})
	}
	families := scrape(t, Client(d))
	for _, name := range []string{"path_connected", "device_open", "request_duration_seconds"} {
		if n := len(families["rnbd_client_"+name].GetMetric()); n != maxNames+1 {
			t.Errorf("%s has %d series, want %d", name, n, maxNames+1)
		}
	}
	for _, name := range []string{"path_security_info", "path_peer_expiry_seconds"} {
		if n := len(families["rnbd_client_"+name].GetMetric()); n != maxNames {
			t.Errorf("%s has %d series, want %d", name, n, maxNames)
		}
	}
	rest := value(t, families, "rnbd_client_path_read_requests_total{fabric=iwarp,path=_other,session=_other}")
	if got := rest.GetCounter().GetValue(); got != 2*maxNames*10 {
		t.Errorf("the rest has %v reads", got)
	}
	h := value(t, families, "rnbd_client_request_duration_seconds{device=_other,op=read,stage=wire}").GetHistogram()
	if h.GetSampleCount() != 2*maxNames*6 {
		t.Errorf("the rest has %d requests", h.GetSampleCount())
	}
}

func busyDaemonStages() []*controlpb.StageStats { return busyDaemon().latency.Devices[0].Stages }

func TestAScrapeThatFailsSaysSo(t *testing.T) {
	d := busyDaemon()
	d.err = errors.New("no answer")
	p, err := Listen("127.0.0.1:0", Client(d), nil, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	r, err := http.Get("http://" + p.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, _ := io.ReadAll(r.Body)
	if r.StatusCode != http.StatusInternalServerError || !strings.Contains(string(text), "no answer") {
		t.Errorf("%s: %s", r.Status, text)
	}
}

func TestAnAddressInUseIsAnError(t *testing.T) {
	p, err := Listen("127.0.0.1:0", Client(busyDaemon()), nil, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := Listen(p.Addr().String(), Client(busyDaemon()), nil, nil, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("two pages on one address")
	}
}

func TestHealthAndReadiness(t *testing.T) {
	d := busyDaemon()
	p, err := Listen("127.0.0.1:0", Client(d), nil, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	check := func(page string, status int, text string) {
		t.Helper()
		r, err := http.Get("http://" + p.Addr().String() + page)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, _ := io.ReadAll(r.Body)
		if r.StatusCode != status || !strings.Contains(string(body), text) {
			t.Errorf("%s: %s %q, want %d with %q", page, r.Status, body, status, text)
		}
	}
	check("/healthz", http.StatusOK, "ok")
	check("/readyz", http.StatusOK, "ok")
	d.info.Plugins[0].State = "failed: crashes too often"
	check("/healthz", http.StatusOK, "ok")
	check("/readyz", http.StatusServiceUnavailable, "plugin nbd: failed: crashes too often")
	d.err = errors.New("no answer")
	check("/healthz", http.StatusServiceUnavailable, "no answer")
}
