package main

import (
	"strings"
	"testing"
)

func TestMetricsBeyondLoopbackAreProtected(t *testing.T) {
	const cert, key, token, ca = "page.pem", "page.key", "token", "ca.pem"
	for _, c := range []struct {
		o    metricsOptions
		want string // the address, or a part of the error
	}{
		{metricsOptions{}, ""},
		{metricsOptions{Metrics: "9800"}, "127.0.0.1:9800"},
		{metricsOptions{Metrics: ":9800"}, "127.0.0.1:9800"},
		{metricsOptions{Metrics: ":0"}, "127.0.0.1:0"},
		{metricsOptions{Metrics: "127.0.0.1:9800"}, "127.0.0.1:9800"},
		{metricsOptions{Metrics: "127.5.0.1:9800"}, "127.5.0.1:9800"},
		{metricsOptions{Metrics: "[::1]:9800"}, "[::1]:9800"},
		{metricsOptions{Metrics: "0.0.0.0:9800"}, "--metrics-token-file, or write 0.0.0.0:9800,trusted"},
		{metricsOptions{Metrics: "[::]:9800"}, "--metrics-cert, --metrics-key"},
		{metricsOptions{Metrics: "192.0.2.1:9800"}, "or --metrics 9800 for this host alone"},
		{metricsOptions{Metrics: "[::ffff:192.0.2.1]:9800"}, "for this host alone"},
		{metricsOptions{Metrics: "192.0.2.1:9800", MetricsTokenFile: token}, "--metrics-cert"},
		{metricsOptions{Metrics: "192.0.2.1:9800", MetricsCert: cert, MetricsKey: key}, "--metrics-token-file"},
		{metricsOptions{Metrics: "192.0.2.1:9800", MetricsCert: cert, MetricsTokenFile: token}, "need each other"},
		{metricsOptions{Metrics: "192.0.2.1:9800", MetricsCert: cert, MetricsKey: key, MetricsTokenFile: token}, "192.0.2.1:9800"},
		{metricsOptions{Metrics: "192.0.2.1:9800", MetricsCert: cert, MetricsKey: key, MetricsClientCA: ca}, "192.0.2.1:9800"},
		{metricsOptions{Metrics: "192.0.2.1:9800,trusted"}, "192.0.2.1:9800"},
		{metricsOptions{Metrics: "0.0.0.0:9800,trusted"}, "0.0.0.0:9800"},
		{metricsOptions{Metrics: "9800,trusted"}, "127.0.0.1:9800"},
		{metricsOptions{Metrics: "192.0.2.1:9800,plain"}, "write [ADDRESS:]PORT"},
		{metricsOptions{Metrics: "::1"}, "write [ADDRESS:]PORT"},
		{metricsOptions{Metrics: "9800", MetricsClientCA: ca}, "--metrics-client-ca needs"},
		{metricsOptions{MetricsTokenFile: token}, "--metrics is not"},
	} {
		addr, err := c.o.address()
		got := ""
		switch {
		case err != nil && exitCode(err) != exitUsage:
			t.Errorf("%+v: %v is no error of usage", c.o, err)
		case err != nil:
			got = err.Error()
		case addr != nil:
			got = addr.String()
		}
		if got != c.want && (err == nil || !strings.Contains(got, c.want)) {
			t.Errorf("%+v: %q, want %q", c.o, got, c.want)
		}
	}
}
